"""``TargetBuild`` and ``TargetLoss``: functions that a person wrote, found by name in every process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.errors import Findings, listing
from meshwright.plan import KEYS
from meshwright.target.function import Role, absolute, error_text, find, importing, line_of, short_path
from meshwright.target.settings import unknown_setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright.deferred import Build

TARGET = Role(
    label="TARGET",
    forms="file.py:function, package.module:function, or hf:<model type or path of a config.json>",
    name="model",
    gives="returns a model and a batch",
    code="""def {name}():
    return MyModel(), {{"x": torch.zeros(8, 16)}}""",
    word="hf:{word}",
)

LOSS = Role(
    label="--loss",
    forms="file.py:function or package.module:function",
    name="loss",
    gives="takes the model's output and returns its loss",
    code="""def {name}(output):
    return output.square().mean()""",
)


@dataclass
class TargetBuild:
    """A ``build`` function that calls a person's function. It can be pickled: another process finds the function by name.

    If the function returns a module, it is called for each model. If it returns a build function, it is called once in a
    process, before any seed is set, and the build function is called for each model.

    Attributes:
        spec: the TARGET.
        settings: keyword arguments of the function.
        returns: what the function returns: ``module`` or ``build``.
        build: the returned build function, in this process.
    """

    spec: str
    settings: Mapping[str, Any]
    returns: str
    build: Build | None = field(default=None, compare=False, repr=False)

    def __call__(self) -> nn.Module:
        if self.returns == "module":
            return call_target(self.spec, self.settings)[0]
        assert self.build is not None
        return self.build()

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "settings": self.settings, "returns": self.returns}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self.build = call_target(self.spec, self.settings, seeded=True)[0] if self.returns == "build" else None


@dataclass
class TargetLoss:
    """A person's loss function of the model's output. It can be pickled: another process finds the function by name.

    Attributes:
        spec: the name, as ``file.py:function`` or ``package.module:function``.
        function: in this process.
    """

    spec: str
    function: Callable[[Any], Tensor] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        findings = Findings(LOSS.subject)
        self.spec = absolute(self.spec, LOSS)
        function = find(self.spec, LOSS, findings)
        findings.raise_if_any()
        assert function is not None
        self.function = function

    def __call__(self, output: Any) -> Tensor:
        return self.function(output)

    def __reduce__(self) -> tuple[type[TargetLoss], tuple[str]]:
        return TargetLoss, (self.spec,)


def call_target(spec: str, settings: Mapping[str, Any], *, seeded: bool = False) -> tuple[Any, ...]:
    """Calls the function of a TARGET.

    Args:
        settings: its keyword arguments.
        seeded: whether it draws the same random numbers in every process, so that all ranks have the same batch.

    Returns:
        (module or build, batch) or (module or build, batch, dataset).

    Raises:
        PlanError: with every problem of the function and of what it returns.
    """
    findings = Findings(TARGET.subject)
    with importing(spec.rpartition(":")[0]):
        function = find(spec, TARGET, findings)
        findings.raise_if_any()
        assert function is not None
        _check_settings(function, settings, spec, findings)
        findings.raise_if_any()
        with _fixed_seed() if seeded else nullcontext():
            returned = _called(function, settings, spec, findings)
    findings.raise_if_any()
    return returned


@contextmanager
def _fixed_seed() -> Iterator[None]:
    """In its block, torch's generator starts from seed 0. Its state is restored afterwards."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _check_settings(function: Callable[..., Any], settings: Mapping[str, Any], spec: str, findings: Findings) -> None:
    """Adds a finding for each setting that is no argument of the function, and for each argument without a value."""
    parameters = inspect.signature(function).parameters
    arguments = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        required = "the function takes no arguments"
        if arguments:
            required = f"an argument of the function ({listing(arguments)})"
        for key, value in settings.items():
            if key not in arguments:
                unknown_setting(key, value, [*arguments, *KEYS], required, findings)
    for name in arguments:
        if parameters[name].default is inspect.Parameter.empty and name not in settings:
            given, required = f"no value for its argument {name}", "a default, or a setting"
            findings.add(where=short_path(spec), given=given, required=required, fix=f"--set {name}=…")


def _called(
    function: Callable[..., Any], settings: Mapping[str, Any], spec: str, findings: Findings
) -> tuple[Any, ...]:
    """Calls the function and checks what it returns. If it raises or returns something else, adds a finding; then ()."""
    source, _, name = spec.rpartition(":")
    try:
        returned = function(**settings)
    except Exception as error:  # a person's function may raise anything
        findings.add(where=line_of(error, source), given=error_text(error), required="a model and a batch")
        return ()
    is_valid = isinstance(returned, tuple) and len(returned) in (2, 3) and callable(returned[0])
    if not is_valid:
        given = f"{name} returns {_type_text(returned)}"
        required = "(module or build, batch), or (module or build, batch, dataset)"
        findings.add(where=short_path(spec), given=given, required=required, fix=TARGET.code.format(name=name))
        return ()
    return returned


def _type_text(value: Any) -> str:
    """The type of a value; of a tuple, the types of its items."""
    if isinstance(value, tuple):
        return f"({', '.join(type(item).__name__ for item in value)})"
    return type(value).__name__
