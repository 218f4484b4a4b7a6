"""WHAT is done: the stages of dvc.yaml, a module each under the stage's name, and what they share. A map of the latter:

- the contract of every stage: stage, definition, outputs, state, journal, locks, interrupts, progress, companions,
  switched_off, trust, versions; their parameters in params/, the schemas of their tables in schemas/, MLflow in tracking/
- data: importer, raw, sources/, jsonl, tokens, comparisons
- training: training, policy_loop (PPO and its variants), loop_inputs, variants, candidates
- judging: exam, results, frontier, given_texts, instruments, questions, judges, pair_judges, extra_models; reward_figures
  for the stage `reward`; page/ for the stage `report`
- what was made from what: provenance, recorded, lineage, rebuild, contents, pipeline_run, leftovers
- no stages, but commands: audit, trace
"""
