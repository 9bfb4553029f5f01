"""Long tables of cases, and whole runs: which of them the default tests leave to the slow ones, in one place.

A test is named with how many of its cases run by default, spread evenly over its table; the others are marked slow,
and so are all cases of a test with 0. What stays shows each behaviour once; `make test-slow` has them all.
"""

import collections

import pytest

KEPT = {
    # every kernel is compiled for an architecture, which takes half a minute
    "tests/kernels/test_offline.py": 0,
    "tests/benchmarks/test_stages.py::test_units_run_in_processes_of_their_own": 0,
    "tests/export/tasks/test_files.py::test_own_weights_above_protobufs_limit_go_beside": 0,
    "tests/export/tasks/test_files.py::test_parallel_branches_are_merged_and_their_ffns_still_shared": 0,
    "tests/export/tasks/test_folder.py::test_an_export_over_an_old_one_leaves_nothing_stale": 0,
    "tests/export/tasks/test_gathered.py::test_mixed_batches_give_each_tasks_logits": 2,
    "tests/export/tensorrt/test_attention.py::test_what_the_exporter_makes_of_a_fused_model_is_accepted": 3,
    "tests/export/test_fuse.py::test_merged_file_gives_timms_logits": 1,
    "tests/export/test_fuse.py::test_onnxruntimes_optimizer_finds_every_attention_and_changes_no_number": 0,
    "tests/export/test_fuse.py::test_the_scale_can_stand_on_q_or_on_the_scores": 0,
    "tests/export/onnx/test_export.py::test_file_gives_timms_logits_at_any_batch": 3,
    "tests/export/graph/test_sizes.py::test_file_gives_timms_logits_at_every_size": 2,
    "tests/kernels/test_add_norm.py::test_operators_keep_torchs_contract": 1,
    "tests/kernels/test_context_broadcast.py::test_kernel_is_the_formula": 4,
    "tests/kernels/test_context_broadcast.py::test_operators_keep_torchs_contract": 1,
    "tests/kernels/test_context_broadcast.py::test_packed_kernel_is_the_formula": 2,
    "tests/kernels/test_grouped_linear.py::test_kernel_is_the_formula": 3,
    "tests/kernels/test_grouped_low_rank.py::test_kernels_are_the_formula": 3,
    "tests/kernels/test_grouped_low_rank.py::test_one_product_of_shared_weights_and_changes_is_the_formula": 2,
    "tests/kernels/test_grouped_low_rank.py::test_operator_keeps_torchs_contract": 1,
    "tests/kernels/test_linear.py::test_kernel_and_reference_are_the_formula": 2,
    "tests/kernels/test_linear_gelu.py::test_kernel_is_the_formula": 2,
    "tests/kernels/test_linear_gelu.py::test_many_tiles_are_all_written": 1,
    "tests/kernels/test_linear_residual.py::test_kernel_in_half_precision_is_as_good_as_torch": 2,
    "tests/kernels/test_linear_residual.py::test_many_tiles_are_all_written": 1,
    "tests/kernels/test_packed_attention.py::test_kernel_is_the_formula": 4,
    "tests/kernels/test_packed_attention.py::test_large_logits_do_not_overflow": 0,
    "tests/kernels/test_packed_attention.py::test_segments_in_the_kernel": 2,
    "tests/kernels/test_patchify.py::test_kernel_is_the_formula": 6,
    "tests/kernels/test_patchify.py::test_operator_keeps_torchs_contract": 1,
    "tests/kernels/test_rotary_attention.py::test_each_part_alone_in_the_kernel": 2,
    "tests/kernels/test_rotary_attention.py::test_kernel_is_the_formula": 2,
    "tests/kernels/test_rotary_attention.py::test_sdpa_behind_the_kernel_that_prepares_heads_is_the_formula": 2,
    "tests/kernels/test_rotary_attention.py::test_segments_in_the_kernel": 1,
    "tests/kernels/test_rotary_attention.py::test_operator_keeps_torchs_contract": 1,
    "tests/kernels/test_short_attention.py::test_kernel_in_half_precision_is_as_good_as_torch": 2,
    "tests/kernels/test_short_attention.py::test_kernel_is_the_formula": 5,
    "tests/kernels/test_tensor_maps.py::test_grouped_linear_keeps_groups_apart": 2,
    "tests/kernels/test_tensor_maps.py::test_linear_residual_takes_every_tile_and_piece_once": 3,
    "tests/kernels/test_tensor_maps.py::test_low_rank_linear_keeps_groups_apart": 1,
    "tests/kernels/test_tensor_maps.py::test_splitk_linear_sums_to_the_product": 2,
    "tests/vtk/analysis/test_loss_diagnostics.py::test_a_result_is_json_and_is_told_and_drawn_beside_another": 3,
    "tests/vtk/analysis/probes/test_residual_units.py::test_a_removed_unit_is_one_whose_last_weights_are_zero": 4,
    "tests/vtk/bank/test_forward.py::test_the_kernels_themselves_with_factors": 2,
    "tests/vtk/commands/test_parallelize.py::test_a_model_without_a_parallel_name_keeps_its_own_and_a_transform": 0,
    "tests/vtk/commands/test_parallelize.py::test_images_without_classes_are_enough": 1,
    "tests/vtk/commands/test_parallelize.py::test_the_original_teaches_the_parallel_model": 0,
    "tests/vtk/data/test_names.py::test_circles_end": 1,
    "tests/vtk/evaluation/test_result_files.py::test_confusion_matrix": 1,
    "tests/vtk/families/test_census.py::test_one_of_each_signature_fused_is_timms_model": 8,
    "tests/vtk/families/test_elsewhere.py::test_sizes_that_windows_cannot_take_are_refused_with_those_they_can": 2,
    "tests/vtk/families/test_table.py::test_weights_of_another_size_fit_or_are_refused_by_the_size_that_fits": 8,
    "tests/vtk/fused/test_families.py::test_beit": 5,
    "tests/vtk/fused/test_families.py::test_naflex_at_its_own_size_and_others": 6,
    "tests/vtk/fused/test_families.py::test_relative_positions": 5,
    "tests/vtk/fused/test_folded.py::test_compiled_it_is_one_program": 0,
    "tests/vtk/fused/test_folded.py::test_context_broadcasting_equals_the_unfused_model": 5,
    "tests/vtk/fused/test_fuse.py::test_compiled_it_is_one_program": 0,
    "tests/vtk/fused/test_fuse.py::test_context_broadcasting_equals_the_unfused_model": 12,
    "tests/vtk/fused/test_fuse.py::test_merged_branches_equal_timm": 8,
    "tests/vtk/fused/test_fuse.py::test_widths": 2,
    "tests/vtk/fused/test_launches.py::test_launches_of_a_forward_pass": 1,
    "tests/vtk/fused/test_onednn_prepack.py::test_tracers_see_plain_operators": 0,
    "tests/vtk/fused/test_real_weights.py::test_folding_real_weights_costs_no_precision": 0,
    "tests/vtk/models/test_context_broadcast.py::test_it_is_captured_as_one_graph": 0,
    "tests/vtk/models/test_positions.py::test_tables_of_tokens": 8,
    "tests/vtk/profiling/test_command.py::test_bare_onnx_with_the_default_backends": 0,
    "tests/vtk/profiling/test_stopped.py::test_reports_of_a_stopped_run_are_written": 0,
    "tests/vtk/runtime/test_backends.py::test_compile_makes_one_static_program_per_batch_size": 0,
    "tests/vtk/bank/test_bank.py::test_a_mixed_batch_equals_single_task_models": 2,
    "tests/vtk/bank/test_bank.py::test_every_part_of_timm_s_model": 4,
    "tests/vtk/bank/test_bank_graphs.py::test_one_graph_turns_tokens_of_every_size_by_their_own_table": 1,
    "tests/vtk/bank/test_factors.py::test_factors_of_every_form_of_attention": 1,
    "tests/vtk/bank/test_families.py::test_packs_of_several_sizes_are_their_own_models": 2,
    "tests/vtk/bank/test_families.py::test_tokens_that_are_no_patches_are_a_task_s_own": 1,
    "tests/vtk/bank/test_forward.py::test_kernels_of_tasks_with_rotary_embedding_and_swiglu": 1,
    "tests/vtk/bank/test_forward.py::test_the_kernels_themselves_with_padding": 1,
    "tests/vtk/bank/test_layout.py::test_padding_reaches_no_row": 3,
    "tests/vtk/bank/test_neighbours.py::test_a_faulty_image_touches_no_row_but_its_own": 4,
    "tests/vtk/bank/test_memory_report.py::test_the_least_recently_used_go": 1,
    "tests/vtk/packs/test_bundle.py::test_a_bundle_needs_no_base": 2,
    "tests/vtk/packs/test_factor_damage.py::test_every_reader_refuses": 20,
    "tests/vtk/packs/test_factor_damage.py::test_a_reader_with_the_base_refuses": 6,
    "tests/vtk/packs/test_factor_forms.py::test_a_merged_checkpoint_of_factors_is_the_formula_in_plain_timm": 1,
    "tests/vtk/packs/test_factor_forms.py::test_other_layouts_come_back_and_lose_nothing_at_full_rank": 1,
    "tests/vtk/packs/test_factor_forms.py::test_the_documents_lines_give_the_model_without_vtk": 1,
    "tests/vtk/packs/test_to_peft.py::test_the_code_of_the_readme_gives_the_packs_logits": 3,
    "tests/vtk/packs/test_peft_read.py::test_the_pack_computes_what_peft_merges": 4,
    "tests/vtk/packs/test_peft_factors.py::test_factors_of_an_adapter_are_in_the_pack_bit_by_bit": 4,
    "tests/vtk/packs/test_peft_factors.py::test_mixed_ranks_become_one_lora_adapter_and_come_back": 2,
    "tests/vtk/packs/test_peft_factors.py::test_what_is_no_small_product_is_merged_into_an_ordinary_pack": 2,
    "tests/vtk/test_functions.py::test_analyze_a_module_and_set_two_side_by_side": 0,
    "tests/vtk/test_functions.py::test_profiles_are_compared_from_files_or_results": 0,
    "tests/vtk/test_main_job.py::test_flat_folders_and_rounded_packs_repeat_their_metric_too": 1,
    "tests/vtk/test_public.py::test_no_package_or_module_shadows_a_name": 0,
    "tests/vtk/test_public.py::test_the_page_on_python_is_true": 0,
    "tests/vtk/training/test_architecture.py::test_a_run_with_factors_comes_back_from_its_pack": 1,
    "tests/vtk/training/test_compile.py::test_a_run_leaves_what_an_uncompiled_one_does_and_goes_on": 0,
    "tests/vtk/training/test_compile.py::test_the_training_is_the_same_and_one_program_takes_every_batch": 0,
    "tests/vtk/training/engine/test_ema.py::test_two_and_two_epochs_equal_four": 0,
    "tests/vtk/training/test_finetune.py::test_an_edited_state_is_a_data_error": 4,
    "tests/vtk/training/test_finetune.py::test_overwrite_with_something_wrong_leaves_the_earlier_run": 2,
    "tests/vtk/training/test_finetune.py::test_two_and_two_epochs_equal_four": 1,
    "tests/vtk/training/runs/test_joint.py::test_a_task_at_another_size_starts_from_the_first": 0,
    "tests/vtk/training/runs/test_joint.py::test_packs_are_those_of_runs_of_their_own": 1,
    "tests/vtk/training/runs/test_joint_model.py::test_context_broadcasting_stays_inside_an_image": 4,
    "tests/vtk/training/runs/test_joint_model.py::test_gradients_are_those_of_the_models_alone": 4,
    "tests/vtk/training/runs/test_label_kinds.py::test_a_run_repeats_resumes_and_differs_from_a_plain_one": 1,
    "tests/vtk/training/policies/test_lora_layers.py::test_dry_run_counts_factors_and_fp16": 0,
    "tests/vtk/training/policies/test_lora_layers.py::test_one_and_one_epochs_equal_two": 0,
    "tests/vtk/training/policies/test_lora_layers.py::test_stock_peft_on_stock_timm_computes_what_the_pack_does": 1,
    "tests/vtk/training/test_memory_blocks.py::test_compiled_blocks_give_the_same_gradients": 1,
    "tests/vtk/training/test_memory_choice.py::test_the_estimate_is_what_real_tensors_keep": 2,
    "tests/vtk/training/test_memory_kept.py::test_compiled_blocks_keep_no_more": 0,
    "tests/vtk/training/test_memory_run.py::test_every_mode_trains_alike": 1,
    "tests/vtk/training/policies/test_policy.py::test_families_train_attention_and_never_an_ffn": 3,
    "tests/vtk/training/test_stems_run.py::test_a_stem_comes_back_from_its_pack_and_checkpoint": 0,
    "tests/vtk/training/test_supcon.py::test_a_run_with_sam_stops_goes_on_and_gives_a_backbone_for_a_linear_head": 0,
}
"""How many cases of a test, or of all tests of a file, run by default."""


def chosen(count: int, kept: int) -> set[int]:
    """Return which of ``count`` cases run by default: the first, the last, and others evenly between them."""
    if kept <= 1:
        return set(range(kept))
    return {round(i * (count - 1) / (kept - 1)) for i in range(kept)}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    tables = collections.defaultdict(list)
    for item in items:
        if "slow" in item.keywords or "gpu" in item.keywords:
            continue
        name = item.nodeid.partition("[")[0]
        file = name.partition("::")[0]
        if name in KEPT or file in KEPT:
            tables[name if name in KEPT else file].append(item)
    for name, table in tables.items():
        stay = chosen(len(table), KEPT[name])
        for i, item in enumerate(table):
            if i not in stay:
                item.add_marker("slow")
