// The compiled part of LocalEngine, for float32 on a CPU: products with packed weights, and a whole step of
// LlamaDecoder in one call. kernels.py compiles, loads and calls it.
//
// A step computes what LlamaDecoder._step_with_torch does, with the same layouts of norms and KV cache. A row does not
// depend on the other rows, because each sum is computed in a fixed order. No function checks its arguments.
//
// Shapes: n rows, H query heads, K key-value heads, D head size, T tokens that fit in a slot, I intermediate size.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr int64_t LANES = 16;  // if the processor's vectors are shorter, the compiler splits each one
typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

// A product keeps TILE_ROWS x PANEL_VECTORS sums in registers.
#ifdef __AVX512F__
constexpr int64_t PANEL_VECTORS = 2, TILE_ROWS = 12;
#else
constexpr int64_t PANEL_VECTORS = 1, TILE_ROWS = 6;
#endif
constexpr int64_t PANEL = PANEL_VECTORS * LANES;
constexpr int64_t BLOCK_ROWS = 4 * TILE_ROWS;  // rows that go through all layers together, to stay in a core's cache

struct Linear {
  const float* packed;  // [panels of outputs, inputs, PANEL]; missing outputs of the last panel are 0
  const float* bias;    // [outputs] or null
  int64_t inputs, outputs;
};

struct Layer {
  Linear qkv, output, gate_up, down;
  const float *input_norm, *mlp_norm;  // [hidden]
  const float* qk_norm;                // [H + K, D] or null
};

struct Model {
  int64_t num_layers, hidden, heads, kv_heads, head_size, intermediate;
  const float *embedding, *final_norm;
  const Layer* layers;
  double eps;
};

struct Cache {
  float *keys, *values;    // [layers, slots, K, T, D]
  int64_t slots, capacity; // T
  const float* rotations;  // [T, D], cosine and sine of each pair
};

Vector& vector(float* values) { return *reinterpret_cast<Vector*>(values); }
const Vector& vector(const float* values) { return *reinterpret_cast<const Vector*>(values); }

float sum(const Vector& vector) {
  float lanes[LANES];
  std::memcpy(lanes, &vector, sizeof lanes);
  for (int64_t width = LANES / 2; width > 0; width /= 2)
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  return lanes[0];
}

// Sums values, or their squares.
template <bool SQUARED>
float sum(const float* values, int64_t count) {
  Vector sums = {};
  float rest = 0;
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES) sums += SQUARED ? vector(values + i) * vector(values + i) : vector(values + i);
  for (; i < count; ++i) rest += SQUARED ? values[i] * values[i] : values[i];
  return sum(sums) + rest;
}

// Computes e^x to 2 units in the last place like Cephes' expf, in a form that compilers vectorize.
inline float exponential(float x) {
  x = x < -87.0f ? -87.0f : x;
  x = x > 88.0f ? 88.0f : x;
  const float n = std::nearbyint(x * 1.44269504f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return (p * r * r + r + 1.0f) * power;
}

// Multiplies TILE rows of inputs by one panel of a weight.
template <int64_t TILE>
void tile_product(const Linear& linear, const float* inputs, int64_t panel, const float* added, float* outputs) {
  Vector sums[TILE][PANEL_VECTORS] = {};
  const float* weights = linear.packed + panel * PANEL * linear.inputs;
  for (int64_t i = 0; i < linear.inputs; ++i, weights += PANEL)
#pragma GCC unroll 16
    for (int64_t row = 0; row < TILE; ++row)
#pragma GCC unroll 2
      for (int64_t part = 0; part < PANEL_VECTORS; ++part)
        sums[row][part] += vector(weights + part * LANES) * inputs[row * linear.inputs + i];
  const int64_t first = panel * PANEL, count = std::min<int64_t>(PANEL, linear.outputs - first);
#pragma GCC unroll 16
  for (int64_t row = 0; row < TILE; ++row) {
    float products[PANEL];
    std::memcpy(products, sums[row], sizeof products);
    const int64_t place = row * linear.outputs + first;
    for (int64_t j = 0; j < count; ++j) {
      float product = products[j];
      if (linear.bias) product += linear.bias[first + j];
      if (added) product += added[place + j];
      outputs[place + j] = product;
    }
  }
}

template <int64_t TILE>
void rest_product(int64_t rows, const Linear& linear, const float* inputs, int64_t panel, const float* added,
                  float* outputs) {
  if constexpr (TILE > 0) {
    if (rows == TILE)
      tile_product<TILE>(linear, inputs, panel, added, outputs);
    else
      rest_product<TILE - 1>(rows, linear, inputs, panel, added, outputs);
  }
}

// outputs [n, outputs] = inputs [n, inputs] times the weight, plus bias and `added`, which may be null or `outputs`.
void product(const Linear& linear, const float* inputs, int64_t n, const float* added, float* outputs) {
  const int64_t panels = (linear.outputs + PANEL - 1) / PANEL;
  for (int64_t panel = 0; panel < panels; ++panel)
    for (int64_t row = 0; row < n; row += TILE_ROWS)
      rest_product<TILE_ROWS>(std::min(TILE_ROWS, n - row), linear, inputs + row * linear.inputs, panel,
                              added ? added + row * linear.outputs : nullptr, outputs + row * linear.outputs);
}

void rms_norm(const float* inputs, const float* weight, int64_t size, double eps, float* outputs) {
  const float squares = sum<true>(inputs, size);
  const float scale = 1 / std::sqrt(squares / static_cast<float>(size) + static_cast<float>(eps));
  for (int64_t i = 0; i < size; ++i) outputs[i] = inputs[i] * scale * weight[i];
}

void rotate(float* head, const float* rotation, int64_t size) {
  for (int64_t i = 0; i < size; i += 2) {
    const float real = head[i], imaginary = head[i + 1];
    head[i] = real * rotation[i] - imaginary * rotation[i + 1];
    head[i + 1] = real * rotation[i + 1] + imaginary * rotation[i];
  }
}

// Attends with one query head to `count` keys and values, [count, D] each; `scores` has space for `count` numbers.
template <int64_t VECTORS>
void attend(const float* query, const float* keys, const float* values, int64_t count, float* scores, float* mixed) {
  constexpr int64_t size = VECTORS * LANES;
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  Vector parts[VECTORS];
  for (int64_t part = 0; part < VECTORS; ++part) parts[part] = vector(query + part * LANES) * scale;
  float most = -INFINITY;
  for (int64_t t = 0; t < count; ++t) {
    Vector dot = parts[0] * vector(keys + t * size);
    for (int64_t part = 1; part < VECTORS; ++part) dot += parts[part] * vector(keys + t * size + part * LANES);
    scores[t] = sum(dot);
    most = std::max(most, scores[t]);
  }
  for (int64_t t = 0; t < count; ++t) scores[t] = exponential(scores[t] - most);
  const float total = sum<false>(scores, count);
  Vector sums[VECTORS] = {};
  for (int64_t t = 0; t < count; ++t)
    for (int64_t part = 0; part < VECTORS; ++part) sums[part] += vector(values + t * size + part * LANES) * scores[t];
  for (int64_t part = 0; part < VECTORS; ++part) vector(mixed + part * LANES) = sums[part] / total;
}

void attend(int64_t size, const float* query, const float* keys, const float* values, int64_t count, float* scores,
            float* mixed) {
  switch (size / LANES) {
    case 1: return attend<1>(query, keys, values, count, scores, mixed);
    case 2: return attend<2>(query, keys, values, count, scores, mixed);
    case 4: return attend<4>(query, keys, values, count, scores, mixed);
    case 8: return attend<8>(query, keys, values, count, scores, mixed);
    case 16: return attend<16>(query, keys, values, count, scores, mixed);
  }
}

// Steps n rows, at most BLOCK_ROWS, in the slots from `slot` on; writes normed hidden states to `outputs` [n, hidden].
void step_block(const Model& model, const Cache& cache, int64_t n, int64_t slot, const int64_t* token_ids,
                const int64_t* positions, float* outputs) {
  const int64_t width = model.hidden, size = model.head_size, kv_heads = model.kv_heads, heads = model.heads;
  const int64_t qkv_width = (heads + 2 * kv_heads) * size, group = heads / kv_heads, inner = model.intermediate;
  thread_local std::vector<float> scratch;  // reused by later steps
  scratch.resize(BLOCK_ROWS * (2 * width + qkv_width + heads * size + 3 * inner) + cache.capacity);
  float* hidden = scratch.data();
  float* normed = hidden + n * width;
  float* qkv = normed + n * width;
  float* mixed = qkv + n * qkv_width;
  float* gate_up = mixed + n * heads * size;
  float* activated = gate_up + n * 2 * inner;
  float* scores = activated + n * inner;

  for (int64_t row = 0; row < n; ++row)
    std::copy_n(model.embedding + token_ids[row] * width, width, hidden + row * width);
  for (int64_t depth = 0; depth < model.num_layers; ++depth) {
    const Layer& layer = model.layers[depth];
    for (int64_t row = 0; row < n; ++row)
      rms_norm(hidden + row * width, layer.input_norm, width, model.eps, normed + row * width);
    product(layer.qkv, normed, n, nullptr, qkv);
    for (int64_t row = 0; row < n; ++row) {
      float* row_qkv = qkv + row * qkv_width;
      const int64_t position = positions[row];
      for (int64_t head = 0; head < heads + kv_heads; ++head) {
        float* values = row_qkv + head * size;
        if (layer.qk_norm) rms_norm(values, layer.qk_norm + head * size, size, model.eps, values);
        rotate(values, cache.rotations + position * size, size);
      }
      for (int64_t kv_head = 0; kv_head < kv_heads; ++kv_head) {
        const int64_t start = (((depth * cache.slots + slot + row) * kv_heads) + kv_head) * cache.capacity * size;
        float *keys = cache.keys + start, *values = cache.values + start;
        std::copy_n(row_qkv + (heads + kv_head) * size, size, keys + position * size);
        std::copy_n(row_qkv + (heads + kv_heads + kv_head) * size, size, values + position * size);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
          attend(size, row_qkv + head * size, keys, values, position + 1, scores, mixed + (row * heads + head) * size);
      }
    }
    product(layer.output, mixed, n, hidden, hidden);
    for (int64_t row = 0; row < n; ++row)
      rms_norm(hidden + row * width, layer.mlp_norm, width, model.eps, normed + row * width);
    product(layer.gate_up, normed, n, nullptr, gate_up);
    for (int64_t row = 0; row < n; ++row) {
      const float *gate = gate_up + row * 2 * inner, *up = gate + inner;
      float* result = activated + row * inner;
      for (int64_t i = 0; i < inner; ++i) result[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];  // SiLU
    }
    product(layer.down, activated, n, hidden, hidden);
  }
  for (int64_t row = 0; row < n; ++row)
    rms_norm(hidden + row * width, model.final_norm, width, model.eps, outputs + row * width);
}

// Blocks of rows that several threads compute; each thread takes the next block. The caller takes blocks too, and waits
// only for blocks that other threads have begun, so a thread that gets no core or is lost in a fork delays nothing.
struct Job {
  const std::function<void(int64_t)> run;  // computes a block
  const int64_t blocks;
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  std::condition_variable is_done;
  int64_t done = 0;

  Job(std::function<void(int64_t)> run, int64_t blocks) : run(std::move(run)), blocks(blocks) {}

  void work() {
    for (int64_t block = next++; block < blocks; block = next++) {
      run(block);
      const std::lock_guard<std::mutex> lock(mutex);
      if (++done == blocks) is_done.notify_one();
    }
  }
};

struct Workers {
  std::mutex mutex;
  std::condition_variable has_job;
  std::deque<std::shared_ptr<Job>> jobs;
  int64_t count = 0;

  void help(const std::shared_ptr<Job>& job, int64_t helpers) {
    const std::lock_guard<std::mutex> lock(mutex);
    try {
      for (; count < helpers; ++count) std::thread([this] { serve(); }).detach();
    } catch (const std::system_error&) {  // no more threads can be started, so fewer threads compute
    }
    for (int64_t helper = 0; helper < helpers; ++helper) jobs.push_back(job);
    helpers == 1 ? has_job.notify_one() : has_job.notify_all();
  }

  // Removes the entries of a job that no helper has taken.
  void forget(const std::shared_ptr<Job>& job) {
    const std::lock_guard<std::mutex> lock(mutex);
    jobs.erase(std::remove(jobs.begin(), jobs.end(), job), jobs.end());
  }

  void serve() {
    for (;;) {
      std::unique_lock<std::mutex> lock(mutex);
      has_job.wait(lock, [this] { return !jobs.empty(); });
      const std::shared_ptr<Job> job = jobs.front();
      jobs.pop_front();
      lock.unlock();
      job->work();
    }
  }
};

// Calls `run(first, end)` for blocks of the n rows, in up to num_threads threads.
template <typename Run>
void in_blocks(int64_t n, int64_t num_threads, const Run& run) {
  const int64_t tiles = (n + TILE_ROWS - 1) / TILE_ROWS;
  const int64_t rows = TILE_ROWS * std::clamp<int64_t>(tiles / num_threads, 1, BLOCK_ROWS / TILE_ROWS);
  const int64_t blocks = (n + rows - 1) / rows;
  const auto run_block = [=](int64_t block) { run(block * rows, std::min(n, (block + 1) * rows)); };
  const int64_t helpers = std::min(num_threads, blocks) - 1;
  if (helpers <= 0) {
    for (int64_t block = 0; block < blocks; ++block) run_block(block);
    return;
  }
  static Workers* const workers = new Workers;  // never deleted
  const auto job = std::make_shared<Job>(run_block, blocks);
  workers->help(job, helpers);
  job->work();
  workers->forget(job);
  std::unique_lock<std::mutex> lock(job->mutex);
  job->is_done.wait(lock, [&] { return job->done == job->blocks; });
}

}  // namespace

extern "C" {

// Returns the number of elements of a packed weight.
int64_t packed_size(int64_t outputs, int64_t inputs) { return (outputs + PANEL - 1) / PANEL * PANEL * inputs; }

// Packs a weight [outputs, inputs] into zeroed memory, or unpacks it.
void repack(float* weight, int64_t outputs, int64_t inputs, float* packed, bool is_back) {
  for (int64_t first = 0; first < outputs; first += PANEL, packed += PANEL * inputs)
    for (int64_t start = 0; start < inputs; start += LANES)
      for (int64_t j = first; j < std::min(first + PANEL, outputs); ++j)
        for (int64_t i = start; i < std::min(start + LANES, inputs); ++i) {
          float &plain = weight[j * inputs + i], &other = packed[i * PANEL + j - first];
          is_back ? plain = other : other = plain;
        }
}

// outputs [n, outputs] = inputs [n, inputs] times the weight, plus bias and added [n, outputs], which may be null.
void linear(const Linear* weight, const float* inputs, int64_t n, const float* added, float* outputs,
            int64_t num_threads) {
  in_blocks(n, num_threads, [=](int64_t first, int64_t end) {
    product(*weight, inputs + first * weight->inputs, end - first, added ? added + first * weight->outputs : nullptr,
            outputs + first * weight->outputs);
  });
}

// Adds the last tokens of rows 0 to n - 1 to the KV cache; writes normed hidden states to outputs [n, hidden].
void step(const Model* model, const Cache* cache, int64_t n, const int64_t* token_ids, const int64_t* positions,
          float* outputs, int64_t num_threads) {
  in_blocks(n, num_threads, [=](int64_t first, int64_t end) {
    step_block(*model, *cache, end - first, first, token_ids + first, positions + first,
               outputs + first * model->hidden);
  });
}
}
