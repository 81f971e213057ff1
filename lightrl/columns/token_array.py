"""TokenArray: the numbers of a column in one Python object. Plain Python, because reward workers use it."""

from __future__ import annotations

import base64
import itertools
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast, overload

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
        TypeError, OverflowError: if a number does not fit the dtype; float32 rounds.
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
        """Restores an array from what `stored` returned."""
        result = cls.__new__(cls)
        result.code, result._values, result._ends = code, values, ends
        return result

    @property
    def stored(self) -> tuple[bytes, bytes]:
        """The numbers in this machine's byte order, and the int32 ends of their runs, empty without runs."""
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
        """Returns the number and length of each run of equal numbers."""
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
        import numpy as np  # late, because reward workers do without it

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
