"""Untrusted model folders: no pickle is read, no code runs by default, and each refusal is one line."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rlhf_core.data.tokenizer import encode_prompt, load_tokenizer
from rlhf_core.errors import UserError
from rlhf_core.models.hf import load_causal_lm, load_scalar_model, scalar_model_from
from tests.security.conftest import edit_json

if TYPE_CHECKING:
    from tests.conftest import Ended, Project

Main = Callable[["Project", str], "Ended"]
Arm = Callable[..., Path]
Offered = Callable[..., Path]
LOADERS: list[Callable[[Path], Any]] = [load_causal_lm, load_scalar_model, lambda path: scalar_model_from(path, 1)]


def refused(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("load", LOADERS, ids=["lm", "scalar", "fresh head"])
@pytest.mark.parametrize("wrapped", [True, False], ids=["torch", "plain pickle"])
def test_pickled_weights_are_never_read(offered: Offered, arm: Arm, load: Callable[[Path], Any], wrapped: bool) -> None:
    folder = offered(num_labels=1)
    (folder / "model.safetensors").unlink()
    mark = arm(folder / "pytorch_model.bin", wrapped)
    refused(lambda: load(folder), r"no model\.safetensors; pickled weights .* convert them to safetensors")
    assert not mark.exists()


def test_a_pickle_under_another_name_is_no_safetensors(offered: Offered, arm: Arm) -> None:
    folder = offered()
    mark = arm(folder / "model.safetensors", wrapped=False)
    refused(lambda: load_causal_lm(folder), "a safetensors file is damaged")
    assert not mark.exists()


def test_a_pickle_beside_good_weights_is_left_alone(offered: Offered, arm: Arm) -> None:
    folder = offered()
    marks = [arm(folder / name) for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt")]
    load_causal_lm(folder)
    load_tokenizer(folder)
    assert not any(mark.exists() for mark in marks)


def test_an_adapter_does_not_lead_to_other_weights(offered: Offered, arm: Arm) -> None:
    folder, elsewhere = offered(), offered("elsewhere")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(elsewhere), "task_type": "CAUSAL_LM", "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(adapter), encoding="utf-8")
    mark = arm(folder / "adapter_model.bin")
    refused(lambda: load_causal_lm(folder), "holds an adapter, not a model; merge it")
    assert not mark.exists()


@pytest.mark.parametrize("load", LOADERS, ids=["lm", "scalar", "fresh head"])
def test_code_of_a_model_does_not_run_unasked(
    own_code: Callable[[Path], Path], tmp_path: Path, load: Callable[[Path], Any]
) -> None:
    mark = own_code(tmp_path / "own")
    refused(lambda: load(tmp_path / "own"), "brings Python code of its own.*set trust_remote_code: true in params.yaml")
    assert not mark.exists()


def test_code_of_a_tokenizer_does_not_run_unasked(offered: Offered, tmp_path: Path) -> None:
    folder, mark = offered(), tmp_path / "owned"
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["own.Own", None]}, tokenizer_class="Own")
    (folder / "own.py").write_text(f"import os\nos.mkdir({str(mark)!r})\n", encoding="utf-8")
    refused(lambda: load_tokenizer(folder), "brings Python code of its own")
    assert not mark.exists()


@pytest.mark.parametrize("trust", [False, True])
def test_code_of_another_repository_is_refused_even_where_code_is_trusted(offered: Offered, trust: bool) -> None:
    """No revision pins it."""
    places = {"AutoConfig": "evil/repo--own.OwnConfig", "AutoModelForCausalLM": "evil/repo--own.OwnLM"}
    folder = offered(model_type="own-kind", auto_map=places)
    says = "takes code from elsewhere .evil/repo--own.OwnConfig" if trust else "brings Python code of its own"
    refused(lambda: load_causal_lm(folder, trust_remote_code=trust), says)


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation"])
def test_a_kernel_of_the_hub_is_code_too(offered: Offered, key: str) -> None:
    refused(lambda: load_causal_lm(offered(**{key: "evil/kernel"})), "the attention kernel evil/kernel, which is code")


def test_a_folder_that_needs_a_missing_package_is_named(offered: Offered) -> None:
    folder = offered(quantization_config={"quant_method": "hqq"})
    refused(lambda: load_causal_lm(folder), "needs a package that is not installed .*HQQ")


TEMPLATES = {
    "classes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
    "mro by filter": "{{ (''|attr('__class__')).__mro__ }}",
    "changes its input": "{{ messages[0].update({'role': 'system'}) }}",
    "endless": "{% for i in range(10**9) %}x{% endfor %}",
    "much memory": "{{ 'x' * 10**15 }}",
    "recursion": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    "reads files": "{% include '/etc/passwd' %}",
    "no template": "{% for %}",
}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_chat_template_stays_in_its_sandbox(offered: Offered, tmp_path: Path, template: str) -> None:
    folder, mark = offered(), tmp_path / "owned"
    (folder / "chat_template.jinja").write_text(template.replace("MARK", str(mark)), encoding="utf-8")
    refused(lambda: load_tokenizer(folder), "its chat template fails .*; correct chat_template.jinja, or remove it")
    assert not mark.exists()


def test_a_template_that_waits_for_a_certain_prompt_is_caught_there(offered: Offered) -> None:
    folder = offered()
    trap = "{% if messages|length > 1 %}{{ ''.__class__.__mro__ }}{% endif %}{{ messages[0].content }}"
    (folder / "chat_template.jinja").write_text(trap, encoding="utf-8")
    tokenizer = load_tokenizer(folder)
    prompt: Any = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert encode_prompt(tokenizer, prompt[:1])
    refused(lambda: encode_prompt(tokenizer, prompt), "SecurityError: access to attribute '__class__'")


@pytest.fixture
def pretrained(finished: "Project") -> "Project":
    """The finished tiny run with data/raw/own as its base model."""
    for key, value in {
        "runtime.tracking": False, "base.source": "pretrained", "base.pretrained": {"model": "own"},
        "sft.max_tokens": 512, "sft.epochs": 1, "long_rows": "drop",
    }.items():  # fmt: skip
        finished.set(key, value)
    return finished


def test_the_stage_base_refuses_pickled_weights(pretrained: "Project", stage_main: Main, offered: Offered) -> None:
    shutil.copytree(offered(), pretrained.root / "data/raw/own")
    (pretrained.root / "data/raw/own/model.safetensors").rename(pretrained.root / "data/raw/own/pytorch_model.bin")
    assert [stage_main(pretrained, stage).code for stage in ("check", "ingest")] == [0, 0]
    ended = stage_main(pretrained, "base")
    assert ended.code == 2
    assert ended.stderr.startswith("base: ")
    assert "pickled weights (pytorch_model.bin) are never loaded" in ended.stderr
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize("stage", ["preferences", "ppo", "evaluate"])
def test_pickled_weights_put_among_our_models_are_refused(
    finished: "Project", stage_main: Main, arm: Arm, stage: str
) -> None:
    finished.set("runtime.tracking", False)
    (finished.root / "models/sft/model.safetensors").unlink()
    mark = arm(finished.root / "models/sft/pytorch_model.bin")
    ended = stage_main(finished, stage)
    assert ended.code == 2
    assert "pickled weights (pytorch_model.bin) are never loaded" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not mark.exists()


@pytest.mark.slow
def test_trusted_code_runs_with_a_warning_at_every_stage(
    pretrained: "Project", stage_main: Main, own_code: Callable[[Path], Path]
) -> None:
    mark = own_code(pretrained.root / "data/raw/own")
    assert [stage_main(pretrained, stage).code for stage in ("check", "ingest")] == [0, 0]
    ended = stage_main(pretrained, "base")
    assert ended.code == 2
    assert "set trust_remote_code: true in params.yaml" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not mark.exists()

    pretrained.set("trust_remote_code", True)
    for stage in ("base", "sft"):
        ended = stage_main(pretrained, stage)
        assert ended.code == 0, ended.stderr
        assert ended.stderr.count("WARNING: trust_remote_code is true") == 1
        assert "runs with your rights" in ended.stderr
        assert (pretrained.root / "models" / stage / "modeling_own.py").is_file()
        assert json.loads((pretrained.root / "models" / stage / "config.json").read_text())["model_type"] == "own-kind"
    assert mark.exists()

    mark.rmdir()
    pretrained.set("trust_remote_code", False)
    ended = stage_main(pretrained, "sft")
    assert ended.code == 2
    assert "brings Python code of its own" in ended.stderr
