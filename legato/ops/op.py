"""What an op is: a function whose body, in plain PyTorch, is its meaning, and the faster functions that may stand in
for it.

Owns declaration (`op`), attachment (`Op.on`) and the one-time choice (`bind`). Knows nothing about any particular op,
model or device. Called by every folder of `legato/ops` at import, and by the engine and `legato doctor` to bind before
anything is captured.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar, overload

P = ParamSpec("P")
R = TypeVar("R")

REFERENCE = "reference"
#: Targets whose implementations are tested on their device.
TESTED_TARGETS = frozenset({"sm90"})

_REGISTRY: dict[str, Op[..., Any]] = {}


class BindError(Exception):
    """An op or implementation that does not exist was asked for."""


@dataclass(frozen=True)
class Implementation(Generic[P, R]):
    """One function that computes an op. `pack` reorders a weight once, at load; `plan` makes per-step metadata once,
    not per layer."""

    target: str
    run: Callable[P, R]
    pack: Callable[..., Any] | None = None
    plan: Callable[..., Any] | None = None


class Op(Generic[P, R]):
    """A named computation. Calling it calls the bound implementation, which is the reference until `bind` chooses
    another."""

    def __init__(self, reference: Callable[P, R], reference_ok: bool, pack: Callable[..., Any] | None) -> None:
        self.name = reference.__name__
        self.folder = reference.__module__.removeprefix(f"{__package__}.").partition(".")[0]
        self.reference = reference
        self.reference_ok = reference_ok
        self.implementations: dict[str, Implementation[P, R]] = {REFERENCE: Implementation(REFERENCE, reference, pack)}
        self.bound = self.implementations[REFERENCE]
        self.__doc__ = reference.__doc__
        self.__name__ = reference.__name__
        self.__wrapped__ = reference

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.bound.run(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<op {self.folder}.{self.name} = {self.bound.target}>"

    def on(
        self, target: str, *, pack: Callable[..., Any] | None = None, plan: Callable[..., Any] | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R]]:
        """Attach the decorated function as this op's implementation for `target` (a file name in the op's folder)."""

        def attach(run: Callable[P, R]) -> Callable[P, R]:
            if target in self.implementations:
                raise BindError(f"op {self.name} already has an implementation for {target}")
            self.implementations[target] = Implementation(target, run, pack, plan)
            return run

        return attach

    def pack(self, *weights: Any) -> Any:
        """The weights as the bound implementation wants them; unchanged (one value, or a tuple) where it does not
        care."""
        if self.bound.pack is not None:
            return self.bound.pack(*weights)
        return weights[0] if len(weights) == 1 else weights

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """Per-step metadata of the bound implementation; None where it needs none."""
        return None if self.bound.plan is None else self.bound.plan(*args, **kwargs)


@overload
def op(reference: Callable[P, R], /) -> Op[P, R]: ...
@overload
def op(
    *, reference_ok: bool = False, pack: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Op[P, R]]: ...
def op(
    reference: Callable[..., Any] | None = None,
    /,
    *,
    reference_ok: bool = False,
    pack: Callable[..., Any] | None = None,
) -> Any:
    """Declare the decorated function as an op and as its own reference.

    `reference_ok=True` says that the reference may serve on every target (it is off the hot path, or already one kernel
    there). `pack` is the reference's own `Op.pack`.
    """

    def declare(function: Callable[..., Any]) -> Op[..., Any]:
        declared = Op(function, reference_ok, pack)
        if declared.name in _REGISTRY:
            raise BindError(f"op {declared.name} is declared twice")
        _REGISTRY[declared.name] = declared
        return declared

    return declare if reference is None else declare(reference)


def registered() -> tuple[Op[..., Any], ...]:
    """Every declared op, in order of declaration."""
    return tuple(_REGISTRY.values())


def implemented(target: str) -> tuple[Op[..., Any], ...]:
    """The ops that have an implementation for `target`, after importing the files named for it. Binds nothing."""
    for declared in registered():
        _import_target(declared.folder, target)
    return tuple(declared for declared in registered() if target in declared.implementations)


@dataclass(frozen=True)
class Bindings:
    """What `bind` chose: op name -> target, in order of declaration, and the ops that fell back to their reference
    unasked."""

    chosen: Mapping[str, str]
    fallbacks: tuple[str, ...]


def bind(targets: Sequence[str], overrides: Mapping[str, str] | None = None) -> Bindings:
    """Choose, once and for the whole process, the implementation behind every op.

    `targets`: names in order of preference, e.g. ("sm90",); empty on a CPU. For each op the first target with an
    implementation wins; only `legato/ops/<folder>/<target>.py` files that exist are imported. `overrides` maps an op
    name or a folder name to a target or to "reference"; an op's own entry beats its folder's.
    Ops without an implementation for any of the targets run their references, of which a warning tells when one first runs,
    unless they are `reference_ok` or overridden. Raises BindError for an unknown op, folder or implementation (with the nearest
    name), and for an implementation whose packages are missing.
    """
    wanted = dict(overrides or {})
    ops = registered()
    names = {declared.name for declared in ops} | {declared.folder for declared in ops}
    for name in wanted:
        if name not in names:
            raise BindError(f"no op or folder of ops is called {name!r}{_near_miss(name, names)}")
    chosen: dict[Op[..., Any], Implementation[..., Any]] = {}
    fallbacks: list[str] = []
    for declared in ops:
        override = wanted.get(declared.name, wanted.get(declared.folder))
        chosen[declared] = _choose(declared, targets, override)
        if chosen[declared].target == REFERENCE and override is None and targets and not declared.reference_ok:
            fallbacks.append(declared.name)
            chosen[declared] = replace(chosen[declared], run=_warned(declared, targets))
    _check_overrides(ops, wanted)
    for declared, implementation in chosen.items():
        declared.bound = implementation
    return Bindings({declared.name: picked.target for declared, picked in chosen.items()}, tuple(fallbacks))


def _warned(declared: Op[..., Any], targets: Sequence[str]) -> Callable[..., Any]:
    """The reference, which warns at its first call that it serves in a kernel's place, and never again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        declared.bound = declared.implementations[REFERENCE]
        message = f"{declared.name} has no implementation for {', '.join(targets)}"
        warnings.warn(f"{message}; its PyTorch reference runs instead.", stacklevel=3)
        return declared.bound.run(*args, **kwargs)

    return run


def _choose(declared: Op[..., Any], targets: Sequence[str], override: str | None) -> Implementation[Any, Any]:
    candidates = [*targets] if override is None else [override, *targets]
    for target in candidates:
        _import_target(declared.folder, target)
        if target in declared.implementations:
            return declared.implementations[target]
    return declared.implementations[REFERENCE]


def _check_overrides(ops: Sequence[Op[..., Any]], wanted: Mapping[str, str]) -> None:
    for name, target in wanted.items():
        known = {
            attached
            for declared in ops
            if name in (declared.name, declared.folder)
            for attached in declared.implementations
        }
        if target not in known:
            hint = _near_miss(target, known)
            raise BindError(f"{name} has no implementation {target!r}{hint}; it has {', '.join(sorted(known))}")


def _import_target(folder: str, target: str) -> None:
    module = f"{__package__}.{folder}.{target}"
    if target == REFERENCE or importlib.util.find_spec(module) is None:
        return
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise BindError(f"{folder}={target} cannot be imported: {error}") from error


def _near_miss(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
