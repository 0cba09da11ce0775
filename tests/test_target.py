"""TARGET: what it gives, that its build reaches other processes, and what is said where something is wrong."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.errors import Finding, PlanError
from meshwright.target import HFTarget, TargetBuild, TargetLoss, head, load_target, with_rows

FILE = """
import torch
from torch import nn
from helper import WIDTH

def model(width: int = WIDTH):
    return nn.Linear(width, 2), {"input": torch.zeros(4, width)}

def lazy():
    batch = {"input": torch.rand(4, 3)}
    return lambda: nn.Linear(3, 2), batch, {"input": torch.rand(32, 3)}

def alone():
    return nn.Linear(3, 2)

def raises():
    return {}["nothing"]

def drawn():
    return nn.Linear(3, 2), {"input": torch.rand(4, 3)}

def twice(output):
    return 2 * output.sum()

def needs(width):
    return nn.Linear(width, 2), ()
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "helper.py").write_text("WIDTH = 3")
    path = tmp_path / "tiny.py"
    path.write_text(FILE)
    return str(path)


def problem(spec: str, settings: dict[str, object] | None = None) -> Finding:
    with pytest.raises(PlanError) as caught:
        load_target(spec, settings)
    (finding,) = caught.value.findings
    return finding


def seeded(build: object) -> list[float]:
    torch.manual_seed(5)
    return build().weight.flatten().tolist()  # type: ignore[operator]


# --- a function -------------------------------------------------------------------------------------------------------


def test_a_module_that_a_function_returns_is_built_anew_wherever_the_build_goes(file: str) -> None:
    target = load_target(f"{file}:model")
    assert isinstance(target.build, TargetBuild)
    assert target.batch["input"].shape == (4, 3)
    assert isinstance(target.build(), nn.Linear)
    assert target.build() is not target.build()
    assert seeded(pickle.loads(pickle.dumps(target.build))) == seeded(target.build)


def test_a_build_that_a_function_returns_need_not_be_picklable(file: str) -> None:
    target = load_target(f"{file}:lazy")
    assert seeded(pickle.loads(pickle.dumps(target.build))) == seeded(target.build) == seeded(lambda: nn.Linear(3, 2))
    assert target.dataset["input"].shape == (32, 3)


def test_settings_are_the_functions_arguments(file: str) -> None:
    assert load_target(f"{file}:model", {"width": 7}).batch["input"].shape == (4, 7)
    finding = problem(f"{file}:model", {"widht": 7})
    assert (finding.where, finding.fix) == ("--set widht=7", "--set width=7")
    assert "no value for its argument width" in problem(f"{file}:needs").given


def test_a_module_that_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_package_of_models").mkdir()
    (tmp_path / "a_package_of_models" / "small.py").write_text(
        "from torch import nn\ndef f(): return nn.Linear(1, 1), ()"
    )
    monkeypatch.chdir(tmp_path)
    assert isinstance(load_target("a_package_of_models.small:f").build(), nn.Linear)


def test_every_process_draws_the_same_rows_and_the_caller_keeps_its_own(file: str) -> None:
    torch.manual_seed(1)
    first = load_target(f"{file}:drawn")
    after = torch.rand(3)
    torch.manual_seed(2)
    assert torch.equal(load_target(f"{file}:drawn").batch["input"], first.batch["input"])
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)
    assert seeded(first.build) != first.build().weight.flatten().tolist()  # the weights follow the seed that is set


def test_a_loss_is_a_value_that_finds_its_function_anew(file: str) -> None:
    loss = pickle.loads(pickle.dumps(TargetLoss(f"{file}:twice")))
    assert loss == TargetLoss(f"{file}:twice")
    assert loss(torch.ones(3)) == 6
    with pytest.raises(PlanError) as caught:
        TargetLoss(f"{file}:twise")
    assert caught.value.findings[0].fix == f"--loss {file}:twice"


@pytest.mark.parametrize("spec", ["", "train.py", "model", "train.py:", "a.py:not a name"])
def test_what_is_no_target(spec: str) -> None:
    assert "file.py:function" in problem(spec).required


def test_a_file_or_function_that_is_not_there_names_the_nearest(file: str) -> None:
    assert problem(f"{file}:modle").fix == f"{file}:model"
    assert problem(file.replace("tiny", "tinny") + ":model").fix == "tiny.py:model"
    assert problem("no_such_module:model").given == "no module no_such_module"


def test_what_a_function_returns_or_raises_is_told_with_its_line(file: str) -> None:
    assert problem(f"{file}:alone").given == "alone returns Linear"
    finding = problem(f"{file}:raises")
    assert finding.given == "KeyError: 'nothing'"
    assert finding.where == f"{Path(file).parent.name}/tiny.py:17"


def test_a_file_that_cannot_be_imported_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("import torch\ndef model(:\n")
    assert ":2:" in problem(f"{path}:model").where
    path.write_text("import torch\nimport a_module_that_nobody_has\n")
    finding = problem(f"{path}:model")
    assert finding.where.endswith("broken.py:2")
    assert finding.fix == "pip install a_module_that_nobody_has"


# --- transformers -----------------------------------------------------------------------------------------------------

TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 32}


READS = {"input_ids", "labels"}
SEES = {"pixel_values", "labels"}
PARTS = {f"{part}.{key}": value for part in ("text_config", "vision_config") for key, value in {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
}.items()}  # fmt: skip
PICTURE = {"vision_config.image_size": 16, "vision_config.patch_size": 8, "text_config.vocab_size": 32}
TWO = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in {
    "layers": 1, "attention_heads": 2, "ffn_dim": 24,
}.items()}  # fmt: skip
BODY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}
EARS = {**BODY, "vocab_size": 32, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
EYES = {**BODY, "image_size": 16, "patch_size": 8}
STAGES = {"hidden_sizes": [4, 8, 8, 8], "depths": [1, 1, 1, 1]}


@pytest.mark.parametrize(
    ("kind", "name", "keys", "settings"),
    [
        # text
        ("llama", "LlamaForCausalLM", READS, {**BODY, "vocab_size": 32}),
        ("gpt2", "GPT2LMHeadModel", READS, {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 32}),
        ("bert", "BertForMaskedLM", READS, {**BODY, "vocab_size": 32}),
        ("albert", "AlbertForMaskedLM", READS, {**BODY, "vocab_size": 32, "embedding_size": 8}),
        ("t5", "T5ForConditionalGeneration", READS, {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 1, "num_heads": 2}),
        ("bart", "BartForConditionalGeneration", READS, {"d_model": 16, "vocab_size": 32, **TWO}),
        ("mixtral", "MixtralForCausalLM", READS, {**BODY, "vocab_size": 32, "num_key_value_heads": 2}),
        ("phi3", "Phi3ForCausalLM", READS, {**BODY, "vocab_size": 32, "num_key_value_heads": 2}),  # pads with token 32000
        ("mamba", "MambaForCausalLM", READS, {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 32}),
        ("rwkv", "RwkvForCausalLM", READS, {"hidden_size": 16, "num_hidden_layers": 2, "vocab_size": 32}),
        ("perceiver", "PerceiverForMaskedLM", READS, {"seq_len": 2048, "num_latents": 8, "d_latents": 16, "d_model": 16}),
        # images, films
        ("vit", "ViTForImageClassification", SEES, EYES),
        ("resnet", "ResNetForImageClassification", SEES, {"embedding_size": 4, **STAGES}),
        ("upernet", "UperNetForSemanticSegmentation", SEES, {"hidden_size": 16}),
        ("videomae", "VideoMAEForVideoClassification", SEES, {**EYES, "num_frames": 4}),
        # sounds
        ("wav2vec2", "Wav2Vec2ForCTC", {"input_values", "labels"}, EARS),
        ("hubert", "HubertForCTC", {"input_values", "labels"}, EARS),
        ("wav2vec2-bert", "Wav2Vec2BertForCTC", {"input_features", "labels"}, {**BODY, "vocab_size": 32}),
        ("whisper", "WhisperForConditionalGeneration", {"input_features", "labels"}, {"d_model": 16, "vocab_size": 64, **TWO}),
        (
            "speech_to_text", "Speech2TextForConditionalGeneration", {"input_features", "labels"},
            {"d_model": 16, "vocab_size": 64, "conv_channels": 8, **TWO},
        ),
        (
            "audio-spectrogram-transformer", "ASTForAudioClassification", {"input_values", "labels"},
            {**BODY, "max_length": 32, "num_mel_bins": 24},
        ),
        # two at once
        ("clip", "CLIPModel", {"input_ids", "pixel_values", "return_loss"}, {**PARTS, **PICTURE}),
        ("llava", "LlavaForConditionalGeneration", {"input_ids", "pixel_values", "labels"}, {**PARTS, **PICTURE}),
        ("smolvlm", "SmolVLMForConditionalGeneration", {"input_ids", "pixel_values", "labels"}, {**PARTS, **PICTURE}),
        (
            "llava_next", "LlavaNextForConditionalGeneration", {"input_ids", "pixel_values", "image_sizes", "labels"},
            {**PARTS, **PICTURE, "image_grid_pinpoints": [[16, 32], [32, 16]]},
        ),
    ],
)  # fmt: skip
def test_the_class_with_a_loss_its_batch_and_the_loss(
    kind: str, name: str, keys: set[str], settings: dict[str, object]
) -> None:
    target = load_target(f"hf:{kind}", {"seq_len": 8, **settings}, rows=3)
    assert isinstance(target.build, HFTarget)
    found = head(target.build.config())
    assert found is not None
    assert found[0].__name__ == name
    assert set(target.batch) == keys
    assert all(len(t) == 3 for t in target.batch.values() if isinstance(t, torch.Tensor))
    torch.manual_seed(0)
    loss = target.build()(**target.batch).loss
    loss.backward()
    assert loss.isfinite()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_a_tiny_one_trains_in_float32(kind: str) -> None:
    target = load_target(f"hf:{kind}", {**TINY, "batch_size": 2, "seq_len": 5})
    model = pickle.loads(pickle.dumps(target.build))()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert target.batch["input_ids"].shape == (2, 5)
    model(**target.batch).loss.backward()


def test_a_class_whose_name_says_no_loss_is_not_warned_about(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import modeling_utils

    told: list[str] = []
    monkeypatch.setattr(modeling_utils.logger, "warning_once", lambda text, *_, **__: told.append(text))
    target = load_target("hf:gpt2", {**TINY, "batch_size": 2, "seq_len": 5})
    assert target.build()(**target.batch).loss.isfinite()
    assert told == []


def test_no_cache_is_filled_in_training_unless_it_is_set(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 16, "use_cache": true}')
    tiny = {"num_hidden_layers": 1, "vocab_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    assert not load_target(f"hf:{tmp_path}", tiny).build().config.use_cache
    assert load_target(f"hf:{tmp_path}", {**tiny, "use_cache": True}).build().config.use_cache


def test_a_config_file_with_settings_over_it(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "llama", "intermediate_size": 24, "dtype": "bfloat16", **TINY}))
    model = load_target(f"hf:{path}", {"intermediate_size": 40}).build()
    assert model.get_parameter("model.layers.0.mlp.up_proj.weight").shape == (40, 16)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert load_target(f"hf:{tmp_path}").build().get_parameter("model.layers.0.mlp.up_proj.weight").shape == (24, 16)


def test_a_part_of_a_config_is_set_by_its_dotted_key() -> None:
    target = load_target("hf:clip", {"text_config.hidden_size": 64, "text_config.num_hidden_layers": 1})
    assert isinstance(target.build, HFTarget)
    assert target.build.config().text_config.hidden_size == 64


def test_special_tokens_move_into_a_smaller_vocabulary_unless_they_are_said() -> None:
    def config(**settings: object) -> object:
        target = load_target("hf:gpt2", {"n_layer": 1, **settings})
        assert isinstance(target.build, HFTarget)
        return target.build.config()

    assert config().eos_token_id == 50256  # type: ignore[attr-defined]
    assert config(vocab_size=32).eos_token_id == 31  # type: ignore[attr-defined]
    assert config(vocab_size=32, eos_token_id=3).eos_token_id == 3  # type: ignore[attr-defined]


def test_no_token_of_a_sample_is_special() -> None:
    batch = load_target("hf:bert", {**TINY, "vocab_size": 4, "pad_token_id": 2}, rows=8).batch
    assert set(batch["input_ids"].unique().tolist()) == {0, 1, 3}


def test_half_as_many_labels_as_frames_and_no_masks_drawn_by_numpy() -> None:
    for kind in ("wav2vec2", "data2vec-audio"):  # one whose config says so, one whose code assumes it
        target = load_target(f"hf:{kind}", {**EARS, "mask_time_prob": 0.9, "mask_time_length": 2}, rows=2, length=10)
        model = target.build()
        model(**target.batch).loss.backward()
        frames = model(target.batch["input_values"]).logits.shape[1]
        assert (frames, target.batch["labels"].shape) == (10, (2, 5))
        assert model.get_parameter(f"{kind.replace('-', '_')}.masked_spec_embed").grad is None


def test_cuts_are_found_for_a_model_that_hears() -> None:
    target = load_target("hf:wav2vec2", EARS, rows=2, length=10)
    recipe = mw.make_recipe(target.build, "tp=2", target.batch)
    assert not any("could not be followed" in note for note in recipe.notes)
    cut = {line.name for line in recipe if isinstance(line.tp, mw.Shard)}
    assert "wav2vec2.encoder.layers.0.feed_forward.output_dense.weight" in cut


def test_a_config_names_its_class(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "bert", "architectures": ["BertForSequenceClassification"], **TINY}))
    target = load_target(f"hf:{path}", {"seq_len": 5}, rows=4)
    assert target.batch["labels"].shape == (4,) and target.batch["input_ids"].shape == (4, 5)
    assert target.build()(**target.batch).loss.isfinite()


def test_a_key_that_only_the_models_code_knows_may_be_set() -> None:
    assert load_target("hf:qwen3_moe", {**BODY, "vocab_size": 32, "head_dim": 8, "num_key_value_heads": 2}).build()
    assert problem("hf:qwen3_moe", {"haed_dim": 8}).given == "the key haed_dim"


def test_mistakes_in_a_config_are_told() -> None:
    assert problem("hf:lama").fix == "hf:llama"
    assert problem("hf:llama", {"hiden_size": 64}).fix == "--set hidden_size=64"
    assert problem("hf:llama", {"recompte": "blocks"}).fix == "--set recompute=blocks"
    assert "not a multiple" in problem("hf:llama", {"hidden_size": 10, "num_attention_heads": 3}).given
    assert "whole number" in problem("hf:llama", {"seq_len": "long"}).required
    assert "no file" in problem("hf:nowhere/config.json").given
    assert "no such class" in problem("hf:detr").given
    assert "no batch that could be generated" in problem("hf:qwen2_vl", {"text_config.vocab_size": 64}).given


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert problem("hf:llama").fix == 'pip install "meshwright[hf]"'


def test_rows_are_repeated_for_their_shapes() -> None:
    batch = {"x": torch.arange(2.0), "scale": torch.tensor(3.0), "flag": True}
    more = with_rows(batch, 5)
    assert more["x"].tolist() == [0, 1, 0, 1, 0]
    assert more["flag"] is True
    assert with_rows(batch, 2) is batch
    large = with_rows({"x": torch.zeros(1, 1 << 20)}, 1000)["x"]
    assert large.shape == (1000, 1 << 20)
    assert large.untyped_storage().nbytes() == 4 << 20
