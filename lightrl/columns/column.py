"""Column: data that travels with tokens, and how to join, cut and pad it; the registry of a run's columns.

TokenArray: a column's numbers in one Python object. All of this is plain Python, because reward workers use it.
"""

from __future__ import annotations

import base64
import itertools
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias, TypeVar, cast, overload

_Number = TypeVar("_Number", bound=float, covariant=True)
DTYPES = {"i": "int32", "f": "float32", "d": "float64", "?": "bool", "B": "uint8"}
_SIZES = {code: struct.calcsize(code) for code in DTYPES}


class TokenArray(Sequence[_Number]):
    """An immutable sequence of numbers of one dtype, one per token, without a Python object for each.

    `array == [1, 2]`, `array[3:5]`, `sum(array)` and `[0] + array` work as with a list. A slice is a TokenArray; `+`
    returns a list. `numpy.asarray(array)` has the same dtype and makes no copy, unless the numbers are stored as runs.

    Args:
        values: a list, a numpy or torch array, or any other iterable of numbers.
        code: the dtype, as in `memoryview.format`: "i" int32, "f" float32, "d" float64, "?" bool, "B" uint8.
        as_runs: store each run of equal numbers as the number and the run's end, unless that takes more memory.

    Raises:
        TypeError, OverflowError: if a number does not fit the dtype; float32 values are rounded.
    """

    __slots__ = ("_ends", "_values", "code")

    def __init__(self, values: Iterable[float], code: str, *, as_runs: bool = False) -> None:
        self.code = code
        self._values: bytes | memoryview = _packed(values, code)
        self._ends = b""  # int32 [runs]; empty if each number is stored
        if as_runs and len(self):
            runs = TokenArray[_Number].of_runs(self.runs(), code)
            if runs.nbytes < self.nbytes:
                self._values, self._ends = runs._values, runs._ends

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[float, int]], code: str) -> TokenArray[_Number]:
        """Builds an array from (number, length of run) pairs, in time proportional to the number of runs."""
        numbers: list[float] = []
        ends, end = array("i"), 0
        for number, length in runs:
            end += length
            if length and numbers and number == numbers[-1]:
                ends[-1] = end
            elif length:
                numbers.append(number)
                ends.append(end)
        return cls.of_stored(_packed(numbers, code), ends.tobytes(), code)

    @classmethod
    def joined(cls, parts: Iterable[Sequence[float]], code: str, *, as_runs: bool = False) -> TokenArray[_Number]:
        arrays = [part if isinstance(part, TokenArray) and part.code == code else cls(part, code) for part in parts]
        if as_runs:
            return cls.of_runs([run for part in arrays for run in part.runs()], code)
        return cls.of_stored(b"".join([part._bytes() for part in arrays]), b"", code)

    @classmethod
    def of_stored(cls, values: bytes | memoryview, ends: bytes, code: str) -> TokenArray[_Number]:
        """Restores an array from the result of `stored`."""
        result = cls.__new__(cls)
        result.code, result._values, result._ends = code, values, ends
        return result

    @property
    def stored(self) -> tuple[bytes, bytes]:
        """The numbers in this machine's byte order, and the int32 ends of their runs (empty without runs)."""
        return bytes(self._values), self._ends

    @classmethod
    def of_text(cls, text: str, code: str) -> TokenArray[_Number]:
        values, ends = map(base64.b64decode, text.split(":"))
        return cls.of_stored(values, ends, code)

    @property
    def text(self) -> str:
        """`stored` as base64, for JSON that is not meant to be read."""
        return ":".join(base64.b64encode(part).decode() for part in self.stored)

    @property
    def nbytes(self) -> int:
        return len(self._values) + len(self._ends)

    def runs(self) -> list[tuple[_Number, int]]:
        """Returns the value and length of each run of equal numbers."""
        if not self._ends:
            return [(number, len(list(run))) for number, run in itertools.groupby(self)]
        ends = self._run_ends().tolist()
        runs = zip(_view(self._values, self.code), ends, [0, *ends[:-1]], strict=True)
        return [(number, end - start) for number, end, start in runs]

    def tolist(self) -> list[_Number]:
        return cast("list[_Number]", self._expanded().tolist())

    def __len__(self) -> int:
        return self._run_ends()[-1] if self._ends else len(self._values) // _SIZES[self.code]

    @overload
    def __getitem__(self, index: int) -> _Number: ...
    @overload
    def __getitem__(self, index: slice) -> TokenArray[_Number]: ...
    def __getitem__(self, index: int | slice) -> _Number | TokenArray[_Number]:
        if isinstance(index, slice):
            numbers = self._expanded()[index]
            return TokenArray.of_stored(numbers.cast("B") if numbers.contiguous else numbers.tobytes(), b"", self.code)
        if self._ends:
            index = bisect_right(self._run_ends(), range(len(self))[index])
        return cast(_Number, _view(self._values, self.code)[index])

    def __iter__(self) -> Iterator[_Number]:
        return iter(self._expanded())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, TokenArray):
            return self._expanded() == other._expanded()
        return self.tolist() == other if isinstance(other, list) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self, *other]

    def __radd__(self, other: Sequence[Any]) -> list[Any]:
        return [*other, *self]

    def __repr__(self) -> str:
        return repr(self.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.array(self.numpy(), dtype=dtype, copy=copy)

    def numpy(self) -> Any:
        """Returns a read-only array [T] of the same dtype, faster than `numpy.asarray`."""
        import numpy as np  # imported here, because reward workers do not load numpy

        return np.frombuffer(self._bytes(), self.code)

    def __reduce__(self) -> tuple[object, ...]:
        return TokenArray.of_stored, (*self.stored, self.code)

    def _run_ends(self) -> memoryview[int]:
        return memoryview(self._ends).cast("i")

    def _expanded(self) -> memoryview[Any]:
        return _view(self._bytes(), self.code)

    def _bytes(self) -> bytes | memoryview:
        """Returns all numbers in this machine's byte order, with runs expanded."""
        if not self._ends:
            return self._values
        values, size, start, parts = bytes(self._values), _SIZES[self.code], 0, []
        for index, end in enumerate(self._run_ends()):
            parts.append(values[index * size : (index + 1) * size] * (end - start))
            start = end
        return b"".join(parts)


def _packed(values: Any, code: str) -> bytes:
    if hasattr(values, "tolist"):  # a numpy or torch array
        if str(getattr(values, "dtype", "")) == DTYPES[code]:
            return cast(bytes, values.tobytes())
        values = values.tolist()
    return bytes(map(bool, values)) if code == "?" else array(code, values).tobytes()


def _view(data: bytes | memoryview, code: str) -> memoryview[Any]:
    return memoryview(data).cast(code)  # type: ignore[call-overload,no-any-return]


Values: TypeAlias = TokenArray[Any]  # a number, `width` numbers, or a code of any length for each token
Columns: TypeAlias = Mapping[str, Values]  # column name → values


@dataclass(frozen=True)
class Column:
    """The declaration of a column; subclasses override how its values are joined and cut.

    Example, a float for each token, 0 where the policy did not sample the token:
        register(Column("doubt", "f"))

    Args:
        name: the column's name in a Completion and in a Trajectory.
        code: the dtype code of its TokenArray.
        fill: the value of padding, and of tokens that the policy did not sample.
        as_runs: store runs; useful if neighboring tokens usually have equal values.
        width: number of values per token; None if it depends on the model.
        field: the column's name in an Experience, where float64 becomes float32, and int32 int64. None means `name`.
        is_hidden: hide it from user code and reward workers.
        is_model_input: models read it in a forward pass; otherwise only the loss reads it.
        is_of_sampler: of all models, only the policy that sampled the tokens reads it.
    """

    name: str
    code: str
    fill: float = 0
    as_runs: bool = False
    width: int | None = 1
    field: str | None = None
    is_hidden: bool = False
    is_model_input: bool = False
    is_of_sampler: bool = False

    comes_with_reward: ClassVar[bool] = False  # set by the reward, possibly after the tokens have reached their ranks
    is_coded: ClassVar[bool] = False  # the values are codes of different lengths, which stay in host memory
    required_if: ClassVar[str] = ""  # a property of Sampling; if it is true, an engine must return the column

    @property
    def fields(self) -> tuple[str, ...]:
        """The column's fields in an Experience. A coded column has two more: each row's start and size in bytes."""
        field = self.field or self.name
        return (field, f"{field}_starts", f"{field}_sizes") if self.is_coded else (field,)

    @property
    def dtype(self) -> str:
        """The numpy dtype in which the values are sent between ranks."""
        return "float32" if self.code == "d" else DTYPES[self.code]

    def array(self, values: Iterable[Any]) -> Values:
        """Makes a TokenArray of the column's dtype; raises ValueError if a number does not fit the dtype."""
        if isinstance(values, TokenArray) and values.code == self.code:
            return values
        try:
            return TokenArray(values, self.code, as_runs=self.as_runs)
        except (TypeError, OverflowError) as error:
            dtype = DTYPES[self.code]
            raise ValueError(f"{self.name} must be numbers of type {dtype}, one for each token: {error}.") from error

    def problem(self, values: Values, num_tokens: int) -> str | None:
        """Returns why the values do not fit `num_tokens` tokens, as text after "A trajectory "; None if they fit."""
        if self.width is None:
            if num_tokens == 0 or len(values) % num_tokens == 0:
                return None
            return (
                f"has {len(values)} values of {self.name} for {num_tokens} token_ids, but each token needs the same "
                "number. Join its completions' columns with lightrl.columns.extended."
            )
        if len(values) == self.width * num_tokens:
            return None
        entries = "one entry" if self.width == 1 else f"{self.width} entries"
        return (
            f"needs {entries} of {self.name} for each of its {num_tokens} token_ids, got {len(values)}. Fix the "
            "workflow or the reward."
        )

    def requirement(self, sampling: Any) -> str:
        """Explains why an engine must return this column if the Sampling property named by `required_if` is true."""
        raise NotImplementedError(f"{type(self).__name__} has required_if but not requirement.")

    def joined(self, parts: Sequence[tuple[Values | None, int]]) -> Values | None:
        """Joins the values of a trajectory's parts, given as (values, number of tokens); None if no part has values."""
        widths = [self._width(values, num) for values, num in parts if values is not None]
        if not widths:
            return None
        arrays = [self.filled(num, max(widths)) if values is None else values for values, num in parts]
        return TokenArray.joined(arrays, self.code, as_runs=self.as_runs)

    def extended(self, before: Values | None, num_before: int, new: Values | None, num_new: int) -> Values | None:
        """Appends a completion's values `new` to a conversation's; None appends fill values, for unsampled tokens."""
        return self.joined([(before, num_before), (new, num_new)])

    def of_completion(self, values: Values, num_prompt: int, num_tokens: int) -> Values:
        """Inverts `extended`: returns a completion's values, given the values of prompt and completion together."""
        return self.cut(values, num_tokens, [(num_prompt, num_tokens)])

    def cut(self, values: Values, num_tokens: int, spans: Sequence[tuple[int, int]]) -> Values:
        """Returns the values of the tokens in these (start, end) spans, concatenated."""
        if list(spans) == [(0, num_tokens)]:
            return values
        edges = iter(self._indices(values, num_tokens, [bound for span in spans for bound in span]))
        parts = [values[start:end] for start, end in zip(edges, edges, strict=True)]
        return parts[0] if len(parts) == 1 else TokenArray.joined(parts, self.code, as_runs=self.as_runs)

    def filled(self, num_tokens: int, width: int = 1) -> Values:
        return TokenArray.of_runs([(self.fill, num_tokens * width)], self.code)

    def rows(self, trajectories: Sequence[Any]) -> list[Any] | None:
        """Returns a numpy array per Trajectory: [T], [T, width], or bytes of codes; None if none has values."""
        columns = [item.columns.get(self.name) for item in trajectories]
        pairs = list(zip(columns, trajectories, strict=True))
        widths = {self._width(values, len(item.token_ids)) for values, item in pairs if values is not None}
        if len(widths) > 1:
            raise ValueError(
                f"Trajectories have different numbers of {self.name} per token, {sorted(widths)}, but all must come "
                "from the trainer's model and sampling. Serve that model with the engine."
            )
        if not widths:
            return None
        (width,) = widths
        rows = [self._default(item, width) if values is None else self.array(values) for values, item in pairs]
        arrays = [row.numpy().astype(self.dtype, copy=False) for row in rows]
        return arrays if self.is_coded or self.width == 1 else [array.reshape(-1, width) for array in arrays]

    def _default(self, trajectory: Any, width: int) -> Values:
        """Returns the values for a trajectory that lacks the column, if other trajectories have it."""
        return self.filled(len(trajectory.token_ids), width)

    def _width(self, values: Values, num_tokens: int) -> int:
        if self.width is not None:
            return self.width
        return len(values) // num_tokens if num_tokens else 0

    def _indices(self, values: Values, num_tokens: int, tokens: Sequence[int]) -> list[int]:
        """Returns the index of each of these tokens' first value; for the token `num_tokens`, returns the end."""
        width = self._width(values, num_tokens)
        return [token * width for token in tokens]


# Columns that every trajectory has, as fields of Trajectory.
TOKENS = {
    column.name: column
    for column in (
        Column("token_ids", "i"),
        Column("loss_mask", "?", as_runs=True),
        Column("behavior_logprobs", "f"),
        Column("weight_versions", "i", fill=-1, as_runs=True),
    )
}
_columns: dict[str, Column] = {}
_by_field = dict(TOKENS)
_reserved: set[str] = set()  # field names of records, which a column would overwrite


def reserve(names: Iterable[str]) -> None:
    """Reserves the names of a record's fields; raises ValueError if a column already has one of these names."""
    _reserved.update(names)
    if taken := _reserved & {name for column in _columns.values() for name in (column.name, *column.fields)}:
        raise ValueError(f"A column cannot be named {min(taken)!r}, which is a field of a record. Choose another name.")


def register(column: Column) -> None:
    """Registers a column, so that completions may contain it and it travels with their tokens to the loss.

    Every process that handles trajectories must register it; workflow workers receive rank 0's registered columns.

    Raises:
        ValueError: if the column's name, or the name of one of its fields, is already taken.
    """
    for name in {column.name, *column.fields}:
        if name in _reserved:
            raise ValueError(f"A column cannot be named {name!r}, which is a field of a record. Choose another name.")
        taken = _columns.get(name) or _by_field.get(name)
        if taken is not None and taken != column:
            raise ValueError(f"A column named {name!r} is already registered: {taken}. Choose another name.")
    _columns[column.name] = column
    _by_field.update(dict.fromkeys(column.fields, column))


def registered() -> tuple[Column, ...]:
    """Returns the registered columns in order of registration, without those of TOKENS."""
    return tuple(_columns.values())


def column_named(name: str) -> Column:
    """Returns the column with this name; raises ValueError if it is not registered."""
    if name not in _columns:
        raise ValueError(f"No column {name!r} is registered, only {[*_columns]}. Call lightrl.columns.register first.")
    return _columns[name]


def column_of(field: str) -> Column | None:
    """Returns the column with this field in an Experience; None if there is none."""
    return _by_field.get(field)


def as_columns(values: Mapping[str, Iterable[Any] | None]) -> dict[str, Values]:
    """Converts the values of columns to TokenArrays, and drops None. Raises ValueError for an unregistered column."""
    return {
        name: numbers if isinstance(numbers, TokenArray) and name not in _columns else column_named(name).array(numbers)
        for name, numbers in values.items()
        if numbers is not None
    }


def extended(before: Columns, num_before: int, new: Columns, num_new: int) -> dict[str, Values]:
    """Appends a completion's columns `new` to a conversation's; `new` is {} for tokens that the policy only read.

    Example, in a workflow with one completion:
        Trajectory(..., columns=extended({}, len(prompt.token_ids), completion.columns, len(completion.token_ids)))
    """
    names = dict.fromkeys([*before, *new])
    return as_columns(
        {name: column_named(name).extended(before.get(name), num_before, new.get(name), num_new) for name in names}
    )


def joined(left: Columns, num_left: int, right: Columns, num_right: int) -> dict[str, Values]:
    """Joins the columns of two parts of a trajectory; each column has a value for every token of its part."""
    parts = {name: [(left.get(name), num_left), (right.get(name), num_right)] for name in [*left, *right]}
    return as_columns({name: column_named(name).joined(part) for name, part in parts.items()})


def cut(columns: Columns, num_tokens: int, start: int, end: int) -> dict[str, Values]:
    """Returns a trajectory's columns for its tokens from `start` to `end`."""
    return {name: column_named(name).cut(values, num_tokens, [(start, end)]) for name, values in columns.items()}
