"""Programs: the launches of a pass, listed once. Native code (`kernels/host/program.cpp`) replays a
list in one call, and where somebody watches Python steps through the same list.

A list consists of names. A name is an argument of the pass, a part of its scratch, a value that is
bound for many calls, or one of `CONSTANTS`; `Vocabulary` says what each must be.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..interop import numel
from ..observe import is_heard, is_observed, stage, tap
from ..quant.format import BlockScaledTensor, Code, Orientation
from ..quant.recipes import BlockShape

Tensor = torch.Tensor

# In the order of `Element` of `fields.hpp`.
ELEMENTS = "tokens", "codes", "bf16", "f32", "i32", "i64", "f16", "size", "value"
BUFFER = "codes *"  # bytes from which parts are cut
CONSTANTS = {"true": True, "false": False, "none": None}
_DTYPES = {
    "codes": torch.uint8,
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
}
_AXIS = re.compile(r"(\d*)([A-Z*])(?:/(\d+))?(?:\+(\d+))?")


class Launch(NamedTuple):
    """A call of a kernel.

    operands: for each argument of the kernel, in its order, the name that gives it. `a|b`: the first
        of the two that is there; `a?`: None where it is not there; `?a`: whether it is there.
    when: names that must all be there, or the launch is left out.
    """

    kernel: str
    operands: Sequence[str]
    when: Sequence[str]


class Form(Protocol):
    """What listeners see of a matrix, which depends on what is beside it."""

    def seen(self, values: Tensor, beside: Any) -> Any:
        """What they see."""

    def put(self, planted: Any, values: Tensor, beside: Any) -> None:
        """Write what one of them has put in its place."""


class Format(NamedTuple):
    """How a matrix is quantised, beside its scales. block: of the logical matrix."""

    block: BlockShape
    code: Code = Code.E4M3
    orientation: Orientation = Orientation.ROWS

    def seen(self, values: Tensor, beside: Tensor) -> BlockScaledTensor:
        return BlockScaledTensor.from_bytes(values, beside, *self)

    def put(self, planted: BlockScaledTensor, values: Tensor, beside: Tensor) -> None:
        values.copy_(planted.bytes)
        beside.copy_(planted.scale_inv)


class Shown(NamedTuple):
    """A matrix that listeners see, and may replace: its values, or a form of them where something is
    beside them. Each is a choice of names as an operand; nothing is shown where no values are there.
    """

    name: str
    values: str
    beside: str = ""
    form: Form | None = None


class Stage(NamedTuple):
    """Launches that a profiler sees under one name, and what they have written."""

    name: str
    launches: list[Launch]
    shows: list[Shown]


def stages_of(text: str, words: Mapping[str, str], forms: Mapping[str, Form]) -> list[Stage]:
    """The stages of a pass as a list in text has them. A line at the margin names a stage, and

        KERNEL OPERAND ... when NAME ...
        show NAME VALUES BESIDE FORM

    below it are its launches and what it shows; what is indented further belongs to the line above.
    A `when` of a stage counts for all its launches.

    Args:
        text: the list.
        words: what a word in it stands for.
        forms: forms by the names that the list has for them.
    """
    stages, common = list[Stage](), list[str]()
    for line in re.sub(r"\n {8}", " ", text).splitlines():
        body, _, when = line.partition(" when ")
        own = [part for word in body.split() for part in words.get(word, word).split()]
        if not own:
            continue
        if not line.startswith(" "):
            stages.append(Stage(own[0], [], []))
            common = when.split()
        elif own[0] == "show":
            _, name, values, *rest = own
            formed = (rest[0], forms[rest[1]]) if rest else ("", None)
            stages[-1].shows.append(Shown(name, values, *formed))
        else:
            stages[-1].launches.append(Launch(own[0], own[1:], [*common, *when.split()]))
    return stages


def table_of(text: str) -> dict[str, str]:
    """Entries between bars or in lines of their own: a name, and what follows it."""
    return dict(
        entry.split(maxsplit=1) for entry in re.split(r"\s*[|\n]\s*", text.strip()) if entry
    )


class Rule(NamedTuple):
    """Arguments of which one of these sets must be given."""

    words: str
    allowed: Sequence[str]


class Buffer(NamedTuple):
    """Bytes that a caller allocates, and chains of parts that lie in them. The first chain begins at the
    beginning. Each of the others begins where the first one ends, so that they share memory.
    """

    alignment: int
    chains: Sequence[str]


class Vocabulary(NamedTuple):
    """What all programs of an engine share.

    tensors: for each tensor its elements and axes. An axis is a letter, `2I`, `E+1`, `H/128`, which is
        rounded up, or `*`; "strided" behind them: in any strides. Names in braces are numbers that
        native code exports. A name that is not in here is a value.
    memory: the buffers by their names.
    bound: what `Programs.bind` takes; messages call it weights.
    head: names of arguments that every program takes, as one tuple `routing`.
    """

    tensors: Mapping[str, str]
    memory: Mapping[str, Buffer]
    bound: Sequence[str]
    head: Sequence[str]


class Part(NamedTuple):
    """A part of a buffer, behind the part of that number or (-1) at the beginning."""

    name: str
    buffer: str
    after: int


def parts_of(memory: Mapping[str, Buffer], buffers: Iterable[str]) -> list[Part]:
    """Every part of these buffers."""
    found = list[Part]()
    for buffer in buffers:
        behind = -1
        for number, chain in enumerate(memory[buffer].chains):
            after = behind
            for name in chain.split():
                found.append(Part(name, buffer, after))
                after = len(found) - 1
            if number == 0:
                behind = after
    return found


class Programs:
    """What all programs of one device are made with: native code, a vocabulary and kernels by name.
    bind: a handle of bound values, by keyword; it owns references to its tensors.
    """

    def __init__(self, native: Any, vocabulary: Vocabulary, kernels: Mapping[str, Any]) -> None:
        numbers = {str(name): int(value) for name, value in native.numbers().items()}
        self.native, self.vocabulary, self.kernels = native, vocabulary, kernels
        self._tensors = {n: text.format(**numbers) for n, text in vocabulary.tensors.items()}
        bound = vocabulary.bound
        self.bind = by_keyword(native.make_bound(self.fields(bound)), bound)

    def fields(self, names: Iterable[str]) -> list[tuple[Any, ...]]:
        """The entries of these names in the form that `fields.hpp` takes."""
        return [self._field(name) for name in names]

    def _field(self, name: str) -> tuple[Any, ...]:
        text = BUFFER if name in self.vocabulary.memory else self._tensors.get(name, "value")
        element, *axes = text.removesuffix(" strided").split()
        numbers = list[int]()
        for axis in axes:
            found = _AXIS.fullmatch(axis)
            assert found is not None, (name, axis)
            times, letter, per, plus = found.groups()
            numbers += ord(letter), int(times or 1), int(per or 1), int(plus or 0)
        return (name, ELEMENTS.index(element), text.endswith(" strided"), *numbers)

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._tensors[name].split()[0]]

    def told(self, parts: Sequence[Part], slots: _Slots) -> list[tuple[int, ...]]:
        """These parts as native code takes them."""
        memory = self.vocabulary.memory
        return [
            (slots(p.name), slots(p.buffer), p.after, memory[p.buffer].alignment) for p in parts
        ]

    def part_ends(self, letters: str) -> Callable[..., dict[tuple[str, str], int]]:
        """The function from the sizes of these letters to the end of each part, in bytes, by its buffer
        and its name.
        """
        slots, memory = _Slots(), self.vocabulary.memory
        parts = parts_of(memory, memory)
        told = self.told(parts, slots)
        ends = self.native.part_ends(letters, self.fields(slots), told)
        names = [(part.buffer, part.name) for part in parts]
        return lambda *sizes: dict(zip(names, map(int, ends(*sizes)), strict=True))


class _Slots(dict[str, int]):
    """Numbers of names, in the order in which somebody first asks for them."""

    def __call__(self, name: str) -> int:
        return self.setdefault(name, len(self))


class Program:
    """One pass. `call` takes its arguments by keyword and launches; where somebody watches it goes
    through the stages one by one.
    """

    def __init__(
        self,
        of: Programs,
        name: str,
        stages: Sequence[Stage],
        buffers: str,
        rules: Sequence[Rule] = (),
        *,
        binds: bool = True,
    ) -> None:
        """The program of these stages. buffers: those that it has parts in, beside the head's. binds:
        whether it takes what is bound, as its first argument `weights`.
        """
        vocabulary, slots = of.vocabulary, _Slots()
        head, memory = vocabulary.head, vocabulary.memory
        bound = [slots(each) for each in vocabulary.bound] if binds else []
        before = [slots(each) for each in head]
        of_rules = [_rule(rule, slots) for rule in rules]
        launches = [_launch(one, of.kernels, slots) for each in stages for one in each.launches]
        held = [each for each in head if each in memory]
        self._parts = parts_of(memory, (*held, *buffers.split()))
        parts = of.told(self._parts, slots)
        # A name that is not bound, not in the head, not a part and no constant is an argument of a call.
        known = {*CONSTANTS, *(part.name for part in self._parts)}
        own = [each for each in list(slots)[len(bound) + len(before) :] if each not in known]
        arguments = *before, *(slots[each] for each in own)
        constants = [(slots[each], value) for each, value in CONSTANTS.items() if each in slots]
        lists = of.fields(slots), parts, of_rules, launches, constants
        run, self._plan, self._step = of.native.make_program(
            (name, binds, bound, arguments, *lists)
        )
        first = ["weights"] * binds
        self._of, self._stages, self._names = of, stages, (*first, *head, *own)
        self.call = by_keyword(run, [*first, "*routing", *own], self._watched)

    def _watched(self, *arguments: Any) -> None:
        """The same launches, with ranges around stages and what listeners plant between them."""
        told = list(map(int, self._plan(*arguments)))
        count = sum(len(each.launches) for each in self._stages)
        find = self._finder(dict(zip(self._names, arguments, strict=True)), told[count:])
        numbers = iter(range(count))
        for each in self._stages:
            active = [n for n in itertools.islice(numbers, len(each.launches)) if told[n]]
            if active:
                with stage(each.name):
                    for number in active:
                        self._step(number, *arguments)
            for shown in each.shows if is_heard() else ():
                _show(shown, find)

    def _finder(self, given: Mapping[str, Any], told: Sequence[int]) -> Callable[[str], Any]:
        """The function from a choice of names to the tensor that a call has under one of them, or None.
        told: of each part where it begins (-1: unused), and its sizes along two axes.
        """
        spans = iter(told)
        places = {
            part.name: (part, begin, sizes)
            for part, begin, *sizes in zip(self._parts, spans, spans, spans, strict=True)
            if begin >= 0
        }

        def find(choice: str) -> Any:
            for name in choice.split("|"):
                if given.get(name) is not None:
                    return given[name]
                if name in places:
                    part, begin, sizes = places[name]
                    return _matrix(given[part.buffer], self._of.dtype(name), begin, sizes)
            return None

        return find


def _matrix(buffer: Tensor, dtype: torch.dtype, begin: int, sizes: Sequence[int]) -> Tensor:
    # Retyped first and sliced then, because Paddle retypes a slice at a wrong address.
    flat = buffer.reshape([numel(buffer)]).view(dtype)
    first = begin // flat.element_size()
    return flat[first : first + math.prod(sizes)].reshape(list(sizes))


def _show(shown: Shown, find: Callable[[str], Any]) -> None:
    values, beside = find(shown.values), find(shown.beside)
    if values is None:
        return
    form = None if beside is None else shown.form
    seen = values if form is None else form.seen(values, beside)
    planted = tap(shown.name, seen)
    # A listener may plant a fault: later launches read this memory.
    if planted is not seen:
        values.copy_(planted) if form is None else form.put(planted, values, beside)


def _rule(rule: Rule, slots: _Slots) -> tuple[str, list[int], list[int]]:
    names = sorted({name for given in rule.allowed for name in given.split()})
    allowed = [sum(1 << names.index(name) for name in given.split()) for given in rule.allowed]
    return rule.words, [slots(name) for name in names], allowed


def _launch(
    launch: Launch, kernels: Mapping[str, Any], slots: _Slots
) -> tuple[Any, str, list[int], list[list[int]]]:
    operands = list[list[int]]()
    for operand in launch.operands:
        taken = 1 if operand.endswith("?") else 2 if operand.startswith("?") else 0
        operands.append([taken, *map(slots, operand.strip("?").split("|"))])
    when = [slots(name) for name in launch.when]
    return kernels.get(launch.kernel), launch.kernel, when, operands


def by_keyword(
    function: Any, names: Sequence[str], watched: Callable[..., None] | None = None
) -> Callable[..., Any]:
    """`function` with all its arguments by keyword, in this order; `*name`: a tuple of several. So a
    call can neither mix up two tensors nor forget one. watched: called in its place where somebody
    watches stages.
    """
    # Compiled once from the names: a loop over them in every call would take longer than the call.
    # They come from lists of this package and never from a caller, so `eval` sees no foreign text.
    call = f"function({', '.join(names)})"
    if watched is not None:
        call = f"{call} if not is_observed() else watched({', '.join(names)})"
    scope = {"function": function, "is_observed": is_observed, "watched": watched}
    keywords = ", ".join(name.removeprefix("*") for name in names)
    made: Callable[..., Any] = eval(f"lambda *, {keywords}: {call}", scope)
    return made
