"""What a person's functions give: a model and its batch, or a loss; found anew in every process."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright.errors import Findings, listing
from meshwright.plan import KEYS
from meshwright.target.function import Role, absolute, find, importing, line_of, short, told
from meshwright.target.settings import unknown_setting

if TYPE_CHECKING:
    from torch import Tensor, nn

    from meshwright.deferred import Build

TARGET = Role(
    place="TARGET",
    forms="file.py:function, package.module:function, or hf:<model type or path of a config.json>",
    name="model",
    gives="returns a model and a batch",
    code="""def {name}():
    return MyModel(), {{"x": torch.zeros(8, 16)}}""",
    word="hf:{word}",
)

LOSS = Role(
    place="--loss",
    forms="file.py:function or package.module:function",
    name="loss",
    gives="takes the model's output and returns its loss",
    code="""def {name}(output):
    return output.square().mean()""",
)


@dataclass
class TargetBuild:
    """``build`` of a function that a person wrote; it calls that function anew in every process.

    Where the function returns a module, each call gives a fresh one. Where it returns a callable, that one is
    found once a process, before any seed is set, and called each time: it then makes the model and nothing else.
    """

    spec: str
    settings: Mapping[str, Any]
    returns: str  # "module" or "build"
    found: Build | None = field(default=None, compare=False, repr=False)

    def __call__(self) -> nn.Module:
        if self.returns == "module":
            return make(self.spec, self.settings)[0]
        assert self.found is not None
        return self.found()

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "settings": self.settings, "returns": self.returns}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self.found = make(self.spec, self.settings, alike=True)[0] if self.returns == "build" else None


@dataclass
class TargetLoss:
    """A loss that a person wrote, a function of the model's output; found once in every process."""

    spec: str
    found: Callable[[Any], Tensor] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        findings = Findings(LOSS.subject)
        self.spec = absolute(self.spec, LOSS)
        function = find(self.spec, LOSS, findings)
        findings.raise_if_any()
        assert function is not None
        self.found = function

    def __call__(self, output: Any) -> Tensor:
        return self.found(output)

    def __reduce__(self) -> tuple[type[TargetLoss], tuple[str]]:
        return TargetLoss, (self.spec,)


def make(spec: str, settings: Mapping[str, Any], *, alike: bool = False) -> tuple[Any, ...]:
    """What the function of a spec returns: (module or build, batch), and a dataset where it has one.

    ``alike``: it draws the same random numbers in every process, since all ranks are to have the same rows.
    """
    findings = Findings(TARGET.subject)
    with importing(spec.rpartition(":")[0]):
        function = find(spec, TARGET, findings)
        findings.raise_if_any()
        assert function is not None
        _check_settings(function, settings, spec, findings)
        findings.raise_if_any()
        with _seeded() if alike else nullcontext():
            made = _called(function, settings, spec, findings)
    findings.raise_if_any()
    return made


@contextmanager
def _seeded() -> Iterator[None]:
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


def _check_settings(function: Callable[..., Any], settings: Mapping[str, Any], spec: str, findings: Findings) -> None:
    parameters = inspect.signature(function).parameters
    takes = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key, value in settings.items():
            if key not in takes:
                required = (
                    f"an argument of the function ({listing(takes)})" if takes else "the function takes no arguments"
                )
                unknown_setting(key, value, [*takes, *KEYS], required, findings)
    for name in takes:
        if parameters[name].default is inspect.Parameter.empty and name not in settings:
            given, required = f"no value for its argument {name}", "a default, or a setting"
            findings.add(where=short(spec), given=given, required=required, fix=f"--set {name}=…")


def _called(
    function: Callable[..., Any], settings: Mapping[str, Any], spec: str, findings: Findings
) -> tuple[Any, ...]:
    place, _, name = spec.rpartition(":")
    try:
        made = function(**settings)
    except Exception as error:  # whatever a person's function may raise
        findings.add(where=line_of(error, place), given=told(error), required="a model and a batch")
        return ()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        given = f"{name} returns {_shape_of(made)}"
        required = "(module or build, batch), or (module or build, batch, dataset)"
        findings.add(where=short(spec), given=given, required=required, fix=TARGET.code.format(name=name))
        return ()
    return made


def _shape_of(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(item).__name__ for item in made)})"
    return type(made).__name__
