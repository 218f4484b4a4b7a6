"""The pages that are made from the code agree with it, and the README's commands exist."""

import importlib.metadata
import importlib.util
import re
import sys
import typing
from pathlib import Path
from types import ModuleType

import pytest
import torch
import typer
from pydantic import BaseModel

from flows.cli import app
from rlhf_core.config.ppo import PPOConfig
from rlhf_core.ppo.health import REMEDIES

ROOT = Path(__file__).resolve().parents[1]


def script(name: str) -> ModuleType:
    """A script of docs/, loaded as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_parameters_page_is_what_the_code_says() -> None:
    assert (ROOT / "docs" / "parameters.md").read_text(encoding="utf-8") == script("make_parameters").page()


def test_the_page_of_files_is_the_one_of_the_schemas() -> None:
    assert (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8") == script("make_files").page()


def test_every_parameter_has_a_meaning() -> None:
    rows = [line for line in script("make_parameters").page().splitlines() if line.startswith("| `")]
    assert len(rows) > 150
    assert [row for row in rows if not row.split("|")[-2].strip()] == []


def test_pictures_are_what_the_code_draws(tmp_path: Path) -> None:
    """To the byte. Each stands on a page of docs/."""
    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    installed = importlib.metadata.version("matplotlib")
    if f"matplotlib=={installed}" not in pinned:
        pytest.skip(f"matplotlib {installed} is not the one of constraints.txt: its bytes may differ")
    pictures = script("make_pictures")
    pictures.write(tmp_path)
    pages = " ".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    for name in pictures.PICTURES:
        assert (tmp_path / f"{name}.svg").read_bytes() == (ROOT / "docs" / f"{name}.svg").read_bytes(), name
        assert f"]({name}.svg)" in pages


def test_the_drawn_cases_are_the_four_of_the_clip() -> None:
    """Each case is marked where the gradient is what its words say; the other picture shows these
    errors."""
    pictures = script("make_pictures")
    for advantage, cases in pictures.CASES.items():
        for case in cases:
            _, gradient = pictures.surrogate(torch.tensor([case.ratio], dtype=torch.float64), advantage)
            assert ("no gradient" in case.says) == (gradient.item() == 0)
            assert gradient.item() * advantage >= 0
    errors, _ = pictures.credit()
    assert errors.tolist() == pytest.approx([0.04, 0.03, 0.06, 0.08, 0.02, 0.05, 0.91])


def test_the_readme_names_only_files_commands_and_make_targets_that_exist() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?:^    |`)make ([a-z0-9-]+)", readme, re.MULTILINE))
    assert targets >= {"run", "test"}
    assert targets <= set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    pages = re.findall(r"\]\((docs/[^)#]+)\)", readme)
    assert len(pages) >= 5
    assert [path for path in pages if not (ROOT / path).exists()] == []
    commands = set(re.findall(r"(?:^    |`|bin/)leash ([a-z][a-z-]*)", readme, re.MULTILINE))
    assert len(commands) >= 8
    assert commands <= {command.name or command.callback.__name__ for command in app.registered_commands}  # type: ignore[union-attr]


PAGES = [ROOT / "README.md", ROOT / "AGENTS.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def anchors(page: Path) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#{1,6} (.*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-") for text in texts}


def test_every_link_of_a_page_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_every_command_of_a_page_exists_with_its_options_and_files() -> None:
    """Of `leash`, in indented lines and in backticks."""
    commands = typer.main.get_group(app).commands
    known = {
        name: {each for p in command.params for each in (*p.opts, *p.secondary_opts)}
        for name, command in commands.items()
    }
    found, wrong = 0, []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        spans = re.findall(r"^    (?:\$ )?(.*)", text, re.MULTILINE) + re.findall(r"`([^`\n]+)`", text)
        calls = [part for span in spans for part in re.split(r"\s#|&&|;|\|", span)]
        for call in calls:
            if named := re.match(r"\s*(?:\.venv/bin/)?leash ([a-z][a-z-]*)\b(.*)", call):
                options = set(re.findall(r"(?<!\S)(--?[A-Za-z][\w-]*)", named[2])) - {"--help"}
                found += 1
                if not options <= known.get(named[1], set()) or named[1] not in known:
                    wrong.append(f"{page.relative_to(ROOT)}: {call}")
        files = re.findall(r"(?<![\w/.-])((?:examples|benchmarks)/[\w.-]+\.\w+)", text)
        wrong += [f"{page.relative_to(ROOT)}: {file}" for file in files if not (ROOT / file).exists()]
    assert found > 100
    assert wrong == []


def test_versions_file_agrees_with_the_constraints() -> None:
    from tasks.stage.versions import declared

    pinned = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    for name, version in declared().items():
        assert f"{name}=={version}" in pinned


TESTS_OF_OPTIONS = {
    "steps critic.learning_rate learning_rate optimizer.warmup_steps optimizer.decay": "test_trainer::"
    "test_rule_16_learning_rates_warm_up_and_decay_each_its_own",
    "batch_size": "test_rules::test_rule_00_batch_size_counts_responses_whatever_the_minibatches",
    "samples_per_prompt": "test_options::test_rule_03_samples_per_prompt_are_different_answers_side_by_side",
    "minibatches ppo_epochs": "test_update::test_rule_14_failure_02_optimizer_steps_are_epochs_times_minibatches",
    "micro_batch_size": "test_update::test_rule_13_micro_batches_give_the_gradient_of_the_one_big_batch",
    "micro_batch_tokens": "test_batching::test_micro_batches_are_full_at_the_lengths_of_real_dialogues",
    "processes": "test_ppo::test_failure_10_a_stage_of_two_processes_makes_what_one_makes",
    "sharding": "test_processes::test_rule_13_divided_models_train_as_whole_ones",
    "gradient_checkpointing": "test_recompute::test_fewer_activations_are_kept_and_gradients_are_the_same",
    "clip_ratio": "test_options::test_rule_15_the_clip_ratio_reaches_the_loss",
    "clip_ratio_high": "test_groups::test_rule_15_the_clip_has_two_sides",
    "ratio": "test_groups::test_rule_15_the_ratio_of_an_answer_is_the_geometric_mean_of_its_tokens",
    "dual_clip": "test_options::test_rule_15_the_dual_clip_reaches_the_loss",
    "stop_kl": "test_options::test_rule_14_a_step_that_went_too_far_ends_early_and_is_marked",
    "importance_cap": "test_options::test_rule_07_the_cap_weighs_tokens_of_an_engine_that_differs",
    "policy_gradient_steps": "test_options::"
    "test_rule_15_the_plain_policy_gradient_warm_up_is_one_epoch_and_one_minibatch",
    "vf_coef entropy_coef": "test_options::test_rule_15_the_coefficients_weigh_the_parts_of_the_loss",
    "check_ratio": "test_options::test_rule_07_the_ratio_check_can_be_switched_off",
    "advantage": "test_options::test_rule_12_each_baseline_reaches_every_token",
    "skip_equal_groups": "test_groups::test_rule_12_the_step_is_that_of_the_other_groups_alone",
    "truncated": "test_groups::test_rule_04_neither_policy_nor_critic_learns_from_answers_that_were_cut_off",
    "gamma lam": "test_options::test_rule_10_gamma_and_lambda_are_those_of_the_settings",
    "loss_average": "test_options::test_the_average_of_the_loss_is_that_of_its_formula",
    "whiten_advantages": "test_trainer::test_advantages_are_used_as_they_are_where_whitening_is_off",
    "critic.kind": "test_actor_critic::test_failure_12_a_shared_critic_reads_policy_and_values_in_one_pass",
    "critic.init": "test_ppo::test_the_critic_starts_where_the_settings_say",
    "critic.value_clip": "test_update::test_rule_16_the_value_clip_has_a_key_of_its_own",
    "critic.clip_value": "test_options::test_rule_16_the_value_clip_can_be_switched_off",
    "critic.warmup_steps": "test_options::test_rule_15_in_the_critic_warm_up_only_the_critic_learns",
    "temperature": "test_trainer::test_rule_05_all_logprobs_use_the_sampling_temperature",
    "max_new_tokens": "test_options::test_rule_04_responses_end_at_max_new_tokens",
    "max_prompt_tokens": "test_bad_input::test_prompts_longer_than_max_prompt_tokens_are_refused_or_left_out",
    "engine": "test_engines::test_the_settings_choose_the_engine",
    "vllm.gpu_memory vllm.max_length": "test_vllm_engine::"
    "test_without_vllm_or_without_a_gpu_the_settings_are_refused_in_one_line",
    "stop_tokens": "test_engines::test_failure_03_a_response_that_closes_with_a_custom_stop_token_has_ended",
    "sampler_rows": "test_engines::test_sampler_rows_changes_no_response",
    "sample_every": "test_pipeline::test_failure_04_samples_are_on_disk_as_often_as_was_asked",
    "snapshot_every": "test_snapshots::test_a_snapshot_brings_back_the_very_weights",
    "kl.coef": "test_trainer::test_a_larger_kl_coefficient_keeps_the_policy_nearer",
    "kl.controller kl.target kl.horizon": "test_trainer::"
    "test_rule_17_rule_23_the_adaptive_controller_follows_the_exact_kl_of_a_sequence",
    "reference_ema": "test_actor_critic::test_a_moving_reference_is_the_average_of_the_policies_of_the_steps",
    "kl.penalty kl.estimator": "test_options::test_rule_15_kl_in_the_loss_pulls_to_the_reference",
    "optimizer.betas optimizer.eps": "test_trainer::test_rule_16_adams_settings_are_the_configurations",
    "optimizer.max_grad_norm": "test_update::test_rule_16_each_model_is_clipped_by_its_own_norm",
    "score.normalise": "test_trainer::test_rule_12_normalise_then_clip_then_penalise",
    "score.clip": "test_trainer::test_rule_12_scores_that_are_not_normalised_are_still_clipped",
    "score.missing_eos_penalty": "test_trainer::test_rule_04_a_missing_end_lowers_the_score_of_a_truncated_response",
    "ptx.coef": "test_ptx::test_the_policy_learns_the_text_and_forgets_it_without",
    "ptx.file": "test_ppo::test_a_text_for_ptx_is_read_from_data_raw",
    "ptx.batch_size": "test_ptx::test_the_loss_is_a_mean_over_the_tokens_of_the_minibatch",
    "ptx.tokens": "test_ptx::test_a_text_is_cut_into_pieces_that_lose_nothing_but_a_last_token",
    "lora.rank lora.alpha": "test_lora::test_alpha_over_rank_scales_the_change",
    "lora.target_modules": "test_lora::test_chosen_layers_alone_are_adapted",
    "lora.quantize": "test_quantised::test_only_adapters_train_and_what_is_saved_computes_as_what_was_trained",
    "runtime.on_alert": "test_alerts::test_stop_ends_the_stage_and_warn_goes_on_from_there",
}
"""Options of PPO, and a test of each: file and function."""


def options_table() -> list[list[str]]:
    """The cells of each row of the options in docs/ppo-options.md."""
    page = (ROOT / "docs" / "ppo-options.md").read_text(encoding="utf-8")
    table = page.split("## Options\n")[1].split("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def leaves(model: type[BaseModel], prefix: str = "") -> set[str]:
    """The keys of a block and of the blocks within it."""
    found = set()
    for name, field in model.model_fields.items():
        parts = (field.annotation, *typing.get_args(field.annotation))
        blocks = [part for part in parts if isinstance(part, type) and issubclass(part, BaseModel)]
        found |= leaves(blocks[0], f"{prefix}{name}.") if blocks else {prefix + name}
    return found


def test_every_option_of_ppo_is_in_the_table_once() -> None:
    named = [key for row in options_table() for key in re.findall(r"`([a-z_.]+)`", row[0])]
    assert len(named) == len(set(named))
    assert set(named) == leaves(PPOConfig) | {"runtime.on_alert"}


def test_every_option_of_ppo_has_a_use_and_a_test_that_exists() -> None:
    rows = options_table()
    assert all(len(row) == 2 and all(row) for row in rows)
    tested = [option for options in TESTS_OF_OPTIONS for option in options.split()]
    assert len(tested) == len(set(tested))
    assert set(tested) == leaves(PPOConfig) | {"runtime.on_alert"}
    for test in TESTS_OF_OPTIONS.values():
        file, name = test.split("::")
        texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob(f"{file}.py")]
        assert any(f"def {name}(" in text for text in texts), test


def test_links_to_lines_lead_to_the_functions_that_they_name() -> None:
    """Where it fails: `python docs/make_lines.py`."""
    lines = script("make_lines")
    pages = {path: path.read_text(encoding="utf-8") for path in (ROOT / "docs").rglob("*.md")}
    assert sum(len(lines.LINK.findall(text)) for text in pages.values()) > 10
    assert [path for path, text in pages.items() if lines.page(path) != text] == []


def test_the_alerts_of_ppo_stand_in_the_table_once() -> None:
    text = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    table = text.split("### Alerts of PPO\n")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `")]
    assert sorted(re.findall(r"`(\w+)`", " ".join(rows))) == sorted(REMEDIES)
