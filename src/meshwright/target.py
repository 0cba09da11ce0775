"""TARGET: what a command line calls a model: something that gives ``(build, batch)``.

    file.py:function             a function of a file: returns (module or build, batch), or (…, batch, dataset)
    package.module:function      the same, of a module that can be imported
    hf:llama                     a model type of transformers, with random weights and a made-up batch
    hf:path/to/config.json       the same, sized as that file says

A build must reach worker processes, and most modules cannot be pickled (nor should they travel). So what travels
is the name: `TargetBuild` and `HFTarget` are values that find the model anew where they are called.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from meshwright.errors import Findings, PlanError, listing, nearest, source_place
from meshwright.plan import KEYS

if TYPE_CHECKING:
    from torch import Tensor, nn

HF = "hf:"
_FORMS = "file.py:function, package.module:function, or hf:<model type or path of a config.json>"
_EXAMPLE = "train.py:model"
_RETURNS = """def {name}():
    return MyModel(), {{"x": torch.zeros(8, 16)}}"""


@dataclass(frozen=True)
class Target:
    """What a TARGET gives.

    Attributes:
        spec: the TARGET itself.
        build: makes the model; a value that can be pickled.
        batch: a sample: a dict of keyword arguments, or a tuple.
        dataset: rows to train on, as ``job.batches`` takes them; None where the target has none.
    """

    spec: str
    build: Callable[[], nn.Module]
    batch: Any
    dataset: Any = None


def load_target(spec: str, settings: Mapping[str, Any] | None = None, *, rows: int = 8, length: int = 16) -> Target:
    """The model that a TARGET names.

    Args:
        settings: of ``hf:``, keys of its config, and ``batch_size`` and ``seq_len`` of the made-up batch; of a
            function, its keyword arguments.
        rows, length: ``batch_size`` and ``seq_len`` where the settings do not say them.

    Raises:
        PlanError: what is wrong with the target, and what to write instead.
    """
    settings = dict(settings or {})
    if spec.startswith(HF):
        return _hf_target(spec, settings, rows, length)
    spec = _absolute(spec)
    made = _make(spec, settings)
    if isinstance(made[0], _module_class()):
        return Target(spec, TargetBuild(spec, settings, "module"), *made[1:])
    return Target(spec, TargetBuild(spec, settings, "build", made[0]), *made[1:])


# --- a function of a file or a module ---------------------------------------------------------------------------------


@dataclass
class TargetBuild:
    """``build`` of a function that a person wrote; it calls that function anew in every process.

    Where the function returns a module, each call gives a fresh one. Where it returns a callable, that one is
    found once a process, before any seed is set, and called each time: it then makes the model and nothing else.
    """

    spec: str
    settings: Mapping[str, Any]
    returns: str  # "module" or "build"
    found: Callable[[], nn.Module] | None = field(default=None, compare=False, repr=False)

    def __call__(self) -> nn.Module:
        if self.returns == "module":
            return _make(self.spec, self.settings)[0]
        assert self.found is not None
        return self.found()

    def __getstate__(self) -> dict[str, Any]:
        return {"spec": self.spec, "settings": self.settings, "returns": self.returns}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        self.found = _make(self.spec, self.settings)[0] if self.returns == "build" else None


def _make(spec: str, settings: Mapping[str, Any]) -> tuple[Any, ...]:
    """What the function of a spec returns: (module or build, batch), and a dataset where it has one."""
    findings = Findings("this target")
    place, _, name = spec.rpartition(":")
    with _importing(place):
        module = _imported(place, spec, findings)
        findings.raise_if_any()
        assert module is not None
        function = _function(module, name, spec, findings)
        findings.raise_if_any()
        assert function is not None
        _check_settings(function, settings, spec, findings)
        findings.raise_if_any()
        made = _called(function, settings, spec, findings)
    findings.raise_if_any()
    return made


def _absolute(spec: str) -> str:
    """The spec, good in any directory. Raises PlanError where it is none."""
    place, colon, name = spec.rpartition(":")
    if not (colon and place and name.isidentifier()):
        findings = Findings("this target")
        path = place or spec
        fix = f"{path}:model" if path.endswith(".py") else HF + spec if _is_word(spec) else _EXAMPLE
        findings.add(where="TARGET", given=spec or "nothing", required=_FORMS, fix=fix)
        findings.raise_if_any()
    return f"{os.path.abspath(place)}:{name}" if place.endswith(".py") else spec


def _is_word(spec: str) -> bool:
    return re.fullmatch(r"[\w-]+", spec) is not None


@contextmanager
def _importing(place: str) -> Iterator[None]:
    """Modules beside a file, or in this directory, can be imported: as where Python runs that file."""
    folder = os.path.dirname(place) if place.endswith(".py") else os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _imported(place: str, spec: str, findings: Findings) -> ModuleType | None:
    try:
        return _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    except FileNotFoundError:
        folder = Path(place).parent
        files = sorted(str(path.relative_to(folder)) for path in folder.glob("*.py")) if folder.is_dir() else []
        _not_there(os.path.basename(place), files, f"no file {place}", spec, findings)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(error.name + ".")):
            names = sorted(path.stem for path in Path.cwd().glob("*.py"))
            _not_there(place, names, f"no module {error.name}", spec, findings)
        else:
            fix = f"pip install {error.name}" if error.name else ""
            findings.add(where=_line(error, place), given=str(error), required="a file that can be imported", fix=fix)
    except Exception as error:  # whatever a person's file may raise
        findings.add(where=_line(error, place), given=_told(error), required="a file that can be imported")
    return None


def _load_file(file: str) -> ModuleType:
    """The module of a file; run once a process. It is entered in ``sys.modules``, where pickle looks for it."""
    name = f"{Path(file).stem}_{zlib.crc32(file.encode()):08x}"
    if name in sys.modules:
        return sys.modules[name]
    if not os.path.exists(file):
        raise FileNotFoundError(file)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _function(module: ModuleType, name: str, spec: str, findings: Findings) -> Callable[..., Any] | None:
    found = getattr(module, name, None)
    if callable(found):
        return found
    names = [
        n for n, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    given = f"{name} is no function" if found is not None else f"no function {name}"
    near = nearest(name, names) or tuple(names[:3])
    required = f"a function there: {listing(near)}" if near else "a function there that returns a model and a batch"
    place = spec.rpartition(":")[0]
    fix = f"{_short(place)}:{near[0]}" if near else _RETURNS.format(name=name)
    findings.add(where=_short(place), given=given, required=required, fix=fix)
    return None


def _check_settings(function: Callable[..., Any], settings: Mapping[str, Any], spec: str, findings: Findings) -> None:
    parameters = inspect.signature(function).parameters
    takes = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        for key, value in settings.items():
            if key not in takes:
                required = (
                    f"an argument of the function ({listing(takes)})" if takes else "the function takes no arguments"
                )
                _unknown_setting(key, value, [*takes, *KEYS], required, findings)
    for name in takes:
        if parameters[name].default is inspect.Parameter.empty and name not in settings:
            given, required = f"no value for its argument {name}", "a default, or a setting"
            findings.add(where=_short(spec), given=given, required=required, fix=f"--set {name}=…")


def _unknown_setting(key: str, value: Any, known: list[str], required: str, findings: Findings) -> None:
    near = nearest(key, known)
    hint = f"; did you mean {near[0]}?" if near else ""
    fix = f"--set {near[0]}={value}" if near else f"leave out --set {key}"
    said = f"{required}, or a key of the plan ({', '.join(KEYS)}){hint}"
    findings.add(where=f"--set {key}={value}", given=f"the key {key}", required=said, fix=fix)


def _called(
    function: Callable[..., Any], settings: Mapping[str, Any], spec: str, findings: Findings
) -> tuple[Any, ...]:
    place, _, name = spec.rpartition(":")
    try:
        made = function(**settings)
    except Exception as error:  # whatever a person's function may raise
        findings.add(where=_line(error, place), given=_told(error), required="a model and a batch")
        return ()
    if not isinstance(made, tuple) or len(made) not in (2, 3) or not callable(made[0]):
        given = f"{name} returns {_shape_of(made)}"
        required = "(module or build, batch), or (module or build, batch, dataset)"
        findings.add(where=_short(spec), given=given, required=required, fix=_RETURNS.format(name=name))
        return ()
    return made


def _shape_of(made: Any) -> str:
    if isinstance(made, tuple):
        return f"({', '.join(type(item).__name__ for item in made)})"
    return type(made).__name__


def _not_there(given: str, names: list[str], what: str, spec: str, findings: Findings) -> None:
    near = nearest(given, names) or tuple(names[:3])
    function = spec.rpartition(":")[2]
    required = f"one that is there: {listing(near)}" if near else f"a TARGET: {_FORMS}"
    findings.add(where="TARGET", given=what, required=required, fix=f"{near[0]}:{function}" if near else _EXAMPLE)


def _line(error: BaseException, place: str) -> str:
    """The innermost line of the person's own file that an error came from."""
    if isinstance(error, SyntaxError) and error.filename:
        return source_place(error.filename, error.lineno, error.offset)
    file = place if place.endswith(".py") else getattr(sys.modules.get(place), "__file__", None)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return source_place(file, lines[-1]) if file and lines else _short(place)


def _told(error: BaseException) -> str:
    text = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {text}".rstrip(": ")


def _short(path: str) -> str:
    """A path below this directory is named from here."""
    here = os.path.relpath(path) if os.path.isabs(path) else path
    return path if here.startswith("..") else here


def _module_class() -> type:
    from torch import nn  # importing this file starts no torch: a wrong target is told at once

    return nn.Module


# --- transformers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HFTarget:
    """``build`` of a model of transformers, with random weights in float32.

    Attributes:
        model: a model type (``llama``), or the path of a ``config.json``.
        settings: keys of the config; of a part of it, dotted: ``text_config.hidden_size``.
    """

    model: str
    settings: tuple[tuple[str, Any], ...] = ()

    def config(self) -> Any:
        """The config of transformers. Raises PlanError."""
        findings = Findings("this target")
        config = _config(self.model, dict(self.settings), findings)
        findings.raise_if_any()
        return config

    def __call__(self) -> nn.Module:
        config = self.config()
        found = head(config)
        if found is None:
            raise PlanError(_no_head(self.model, config), "this target")
        config.dtype = None  # a config may ask for bfloat16; here the plan says what is computed in
        model = found[0](config)
        if (
            getattr(model, "loss_type", "") is None
        ):  # the class's name says none: transformers takes this one, and warns
            model.loss_type = "ForCausalLM"
        return model


def _hf_target(spec: str, settings: dict[str, Any], rows: int, length: int) -> Target:
    findings = Findings("this target")
    model = spec[len(HF) :]
    if importlib.util.find_spec("transformers") is None:
        fix = 'pip install "meshwright[hf]"'
        findings.add(where=spec, given="transformers is not installed", required="transformers, an extra", fix=fix)
        findings.raise_if_any()
    rows = _size("batch_size", settings, findings) or rows
    tokens = _size("seq_len", settings, findings)
    model = os.path.abspath(_json_of(model)) if _is_path(model) else model
    config = _config(model, settings, findings)
    findings.raise_if_any()
    found = head(config)
    if found is None:
        raise PlanError(_no_head(model, config), "this target")
    batch = sample(config, *found, rows=rows, length=tokens, default=length)
    return Target(spec, HFTarget(model, tuple(settings.items())), batch)


def _size(key: str, settings: dict[str, Any], findings: Findings) -> int | None:
    """A size of the made-up batch, taken out of the settings; None where they do not say it."""
    value = settings.pop(key, None)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    required = "a whole number of at least 1"
    findings.add(where=f"--set {key}={value}", given=repr(value), required=required, fix=f"--set {key}=8")
    return None


def _is_path(model: str) -> bool:
    return "/" in model or os.sep in model or model.endswith(".json") or os.path.exists(model)


def _json_of(model: str) -> str:
    """A folder stands for the config in it."""
    return os.path.join(model, "config.json") if os.path.isdir(model) else model


def _config(model: str, settings: Mapping[str, Any], findings: Findings) -> Any:
    """The config of a model type or file, with settings; None where something is wrong, which is in ``findings``."""
    from transformers import CONFIG_MAPPING

    values = _config_file(model, findings) if _is_path(model) else {"model_type": model}
    if values is None:
        return None
    kind = str(values.pop("model_type", ""))
    kinds = list(CONFIG_MAPPING.keys())
    if kind not in kinds:
        near = nearest(kind, kinds) or ("llama", "gpt2", "bert")
        required = f"a model type of transformers, such as {listing(near)}, or the path of a config.json"
        findings.add(where=f"{HF}{model}", given=f"the model type {kind!r}", required=required, fix=f"{HF}{near[0]}")
        return None
    for key, value in settings.items():
        _set(values, key, value)
    try:
        _check_keys(CONFIG_MAPPING[kind](), settings, findings)
        return None if findings else _started(CONFIG_MAPPING[kind].from_dict(values))
    except Exception as error:  # each config of transformers checks its values in its own way
        said = ", ".join(f"{key}={value}" for key, value in settings.items())
        given = " ".join(str(error).split())
        findings.add(where=f"{HF}{model} {said}".strip(), given=given, required="values that fit each other")
        return None


def _started(config: Any) -> Any:
    """Some configs leave it to a checkpoint with which token a decoder starts."""
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = getattr(config, "pad_token_id", None) or 0
    return config


def _config_file(path: str, findings: Findings) -> dict[str, Any] | None:
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        given = f"no file {_short(path)}" if isinstance(error, FileNotFoundError) else _told(error)
        required = "a config.json on this machine (nothing is downloaded), or a model type"
        findings.add(where=f"{HF}{_short(path)}", given=given, required=required, fix=f"{HF}llama")
        return None
    if not isinstance(values, dict):
        findings.add(where=_short(path), given=type(values).__name__, required="the keys of a config", fix=f"{HF}llama")
        return None
    return values


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    """``text_config.hidden_size`` goes into the config within."""
    first, dot, rest = key.partition(".")
    if not dot:
        values[key] = value
        return
    inner = values.setdefault(first, {})
    if isinstance(inner, dict):
        _set(inner, rest, value)


def _check_keys(default: Any, settings: Mapping[str, Any], findings: Findings) -> None:
    """A config takes any key without a word; a misspelt one would be lost."""
    for key, value in settings.items():
        config, parts = default, key.split(".")
        for part in parts[:-1]:
            config = getattr(config, part, None)
        if config is None or not hasattr(config, parts[-1]):
            known = sorted(k for k in {*vars(config or default), *default.attribute_map} if not k.startswith("_"))
            prefix = key.rpartition(".")[0]
            known = [f"{prefix}.{k}" if prefix else k for k in known]
            words = [*known, "batch_size", "seq_len", *KEYS]
            _unknown_setting(key, value, words, f"a key of {type(default).__name__}, batch_size, seq_len", findings)


# Which class of a model has a loss, by what the model's own lists in transformers say, the first that fits:
# an encoder-decoder is a translator, an encoder fills masks, what else reads predicts the next token; what sees
# compares images with texts, or names what they show.
_HEADS = (
    ("tokens", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", lambda config: config.is_encoder_decoder),
    ("tokens", "MODEL_FOR_MASKED_LM_MAPPING", lambda config: not getattr(config, "is_decoder", False)),
    ("tokens", "MODEL_FOR_CAUSAL_LM_MAPPING", lambda config: True),
    ("pairs", "MODEL_MAPPING", lambda config: True),
    ("classes", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", lambda config: True),
)
_INPUTS = {"tokens": ("input_ids", "labels"), "classes": ("pixel_values", "labels"), "pairs": ("return_loss",)}


def head(config: Any) -> tuple[Any, str] | None:
    """The model class with a loss for a config, and what its batch is: ``tokens``, ``classes`` or ``pairs``.

    The config's own ``architectures`` come first, where their forward takes what we can make up.
    """
    import transformers

    named = [getattr(transformers, name, None) for name in getattr(config, "architectures", None) or ()]
    for cls in filter(None, named):
        for kind, inputs in _INPUTS.items():
            if _takes(cls, inputs):
                return cls, kind
    for kind, mapping, fits in _HEADS:
        cls = getattr(transformers, mapping).get(type(config), None)
        cls = cls[0] if isinstance(cls, tuple | list) else cls
        if cls is not None and fits(config) and _takes(cls, _INPUTS[kind]):
            return cls, kind
    return None


def _takes(cls: Any, names: tuple[str, ...]) -> bool:
    return set(names) <= set(inspect.signature(cls.forward).parameters)


def _no_head(model: str, config: Any) -> tuple[Any, ...]:
    findings = Findings()
    required = "a model that has a loss of its own on tokens, on images with classes, or on pairs of both"
    given = f"{type(config).__name__}: no such class of it is known to transformers"
    findings.add(where=f"{HF}{model}", given=given, required=required, fix=_RETURNS.format(name="model"))
    return tuple(findings)


def sample(config: Any, cls: Any, kind: str, *, rows: int, length: int | None, default: int) -> dict[str, Any]:
    """A made-up batch, the same at each call: random tokens and images, every label counts.

    Args:
        length: tokens a row; None: ``default``, or less where the model has fewer positions.
    """
    import torch

    generator = torch.Generator().manual_seed(0)
    text, vision = config.get_text_config(), getattr(config, "vision_config", None) or config
    limit = getattr(text, "max_position_embeddings", None)
    if length is None:  # some models keep two positions for padding
        length = min(default, limit - 2) if isinstance(limit, int) and limit > 2 else default
    batch: dict[str, Any] = {}
    if "input_ids" in inspect.signature(cls.forward).parameters:
        batch["input_ids"] = _tokens(text, (rows, length), generator)
    if kind in ("classes", "pairs"):
        batch["pixel_values"] = torch.randn(rows, *_image(vision), generator=generator)
    if kind == "tokens":
        batch["labels"] = _tokens(text, (rows, length), generator)
    elif kind == "classes":
        batch["labels"] = torch.randint(config.num_labels, (rows,), generator=generator)
    else:
        batch["return_loss"] = True
    return batch


def _tokens(config: Any, shape: tuple[int, int], generator: Any) -> Tensor:
    """Random tokens, none of them padding."""
    import torch

    ids = torch.randint(config.vocab_size, shape, generator=generator)
    pad = getattr(config, "pad_token_id", None)
    return ids if not isinstance(pad, int) else torch.where(ids == pad, (pad + 1) % config.vocab_size, ids)


def _image(config: Any) -> tuple[int, int, int]:
    """Channels, height and width."""
    size = getattr(config, "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else tuple(size)[:2]
    return getattr(config, "num_channels", None) or 3, height, width


def with_rows(batch: Any, rows: int) -> Any:
    """A batch with at least so many rows, for its shapes: the rows there are, again and again."""
    from torch import Tensor
    from torch.utils import _pytree as pytree

    tensors = [t for t in pytree.tree_leaves(batch) if isinstance(t, Tensor) and t.dim()]
    given = len(tensors[0]) if tensors else 0
    if not given or given >= rows:
        return batch
    again = [i % given for i in range(rows)]

    def more(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim() or len(t) != given:
            return t
        large = t.nbytes // given * rows > _LARGE
        return t[:1].expand(rows, *t.shape[1:]) if large else t[again]  # one row many times takes no memory

    return pytree.tree_map(more, batch)


_LARGE = 64 << 20  # bytes
