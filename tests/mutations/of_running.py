"""Mutations of what keeps a run whole: checkpoints, lease, ranks, going on elsewhere."""

from tests.mutations import Mutation

CHECKPOINT = "lm/runs/checkpoint.py"
CHECKSUMS = "lm/model/checksums.py"
LEASE = "lm/runs/lease.py"
ENGINE = "lm/training/engine.py"
RESHARD = "lm/training/reshard.py"
TRAIN = "lm/training/train.py"
LOOP = "lm/training/loop.py"
VALIDATION = "lm/training/validation.py"
SAVING = "tests/lm/runs/test_saving.py::"
RECOVERY = "tests/lm/training/test_recovery.py::"
VOUCHING = "tests/lm/runs/test_vouching.py::"
HOLDING = "tests/lm/runs/test_lease.py::"
ELASTIC = ("tests/lm/training/test_elastic.py::test_one_rank_goes_on_under_another_stage",)
OPEN = "tests/hf/test_hf_export.py::test_a_folder_that_others_may_write_into_is_refused"
BACK = (
    "tests/lm/training/test_recovery.py::test_nan_goes_back_to_the_checkpoint_and_on_with_the_next_data",
)


def saving(*names):
    return tuple(SAVING + name for name in names)


def probed(*names):
    return tuple("tests/lm/training/test_validation.py::" + name for name in names)


def holding(*names):
    return tuple(HOLDING + name for name in names)


MUTATIONS = [
    Mutation(
        "running: a probe reads a micro-batch of any size",
        VALIDATION,
        "stable=True)[:count]",
        "stable=True)",
        probed("test_a_large_micro_batch_is_cut_before_it_is_probed"),
    ),
    Mutation(
        "running: a probe reads sequences without targets first",
        VALIDATION,
        "torch.argsort(is_empty.int()",
        "torch.argsort(-is_empty.int()",
        probed("test_a_probe_reads_sequences_with_targets_first"),
    ),
    Mutation(
        "running: an update's temporaries are given back to the system",
        "lm/common/heap.py",
        "(M_TRIM_THRESHOLD, -1), (M_TOP_PAD, 2**26)",
        "(M_TRIM_THRESHOLD, 2**17), (M_TOP_PAD, 0)",
        ("tests/lm/common/test_heap.py::test_temporaries_find_the_memory_of_those_before",),
    ),
    Mutation(
        "running: memory is kept on a GPU's machine, too",
        ENGINE,
        "    if not on_gpu:\n        keep_freed_memory()",
        "    keep_freed_memory()",
        ("tests/lm/common/test_heap.py::test_trainings_on_a_cpu_keep_it",),
    ),
    Mutation(
        "running: carried kernels may be changed by the group",
        "lm/model/operators.py",
        "found.st_mode & 0o022",
        "found.st_mode & 0o002",
        (OPEN,),
    ),
    Mutation(
        "running: the folder around carried kernels may be anybody's",
        "lm/model/operators.py",
        "for place in (folder, folder.parent):",
        "for place in (folder,):",
        (OPEN,),
    ),
    Mutation(
        "running: what is saved is not copied",
        CHECKPOINT,
        'value.detach().to("cpu", copy=True)',
        "value.detach()",
        saving("test_what_is_saved_is_what_was_there_at_the_time"),
    ),
    Mutation(
        "running: a tensor that occurs twice is copied twice",
        CHECKPOINT,
        "if key not in copies or not value.numel():",
        "if True:",
        saving("test_a_snapshot_copies_each_tensor_once"),
    ),
    Mutation(
        "running: a checkpoint gets its name before its manifest",
        CHECKPOINT,
        "        write_json(job.partial / MANIFEST, manifest)\n",
        "",
        saving("test_what_is_saved_is_what_was_there_at_the_time"),
    ),
    Mutation(
        "running: files are not synced",
        CHECKPOINT,
        "            torch.save(state, file)\n        sync(path)\n",
        "            torch.save(state, file)\n",
        saving("test_files_are_synced_before_the_name_is_given"),
    ),
    Mutation(
        "running: the folder of names is not synced",
        CHECKPOINT,
        "            job.partial.rename(path)\n            sync(self.folder)\n",
        "            job.partial.rename(path)\n",
        saving("test_files_are_synced_before_the_name_is_given"),
    ),
    Mutation(
        "running: damaged checkpoints count as kept",
        CHECKPOINT,
        "whole = [path for path in passing if self._is_intact(path)]",
        "whole = passing",
        saving("test_a_damaged_one_does_not_count_for_those_to_keep"),
    ),
    Mutation(
        "running: one too few is kept",
        CHECKPOINT,
        "whole[: -self.settings.keep]",
        "whole[: 1 - self.settings.keep]",
        saving("test_old_ones_go_and_those_of_keep_every_stay"),
    ),
    Mutation(
        "running: keep_every keeps the others",
        CHECKPOINT,
        "if not every or step_of(path) % every]",
        "if not every or not step_of(path) % every]",
        saving("test_old_ones_go_and_those_of_keep_every_stay"),
    ),
    Mutation(
        "running: checkpoints are sorted by name",
        CHECKPOINT,
        "if p.is_dir() and NAME.fullmatch(p.name)), key=step_of)",
        "if p.is_dir() and NAME.fullmatch(p.name)))",
        saving("test_the_order_is_that_of_the_numbers"),
    ),
    Mutation(
        "running: the digest is not compared",
        CHECKSUMS,
        "if sha256(path, once) != digest:",
        "if False:",
        saving("test_damage_is_passed_over_with_a_sentence"),
    ),
    Mutation(
        "running: nothing whole is a new beginning",
        CHECKPOINT,
        "    if found and before == math.inf:\n        raise CheckpointError(",
        "    if False:\n        raise CheckpointError(",
        saving("test_damage_is_passed_over_with_a_sentence"),
    ),
    Mutation(
        "running: a rank that failed keeps it to itself",
        CHECKPOINT,
        "            self.ranks.raise_any(job.error)\n            self._thread.join()\n",
        "            self._thread.join()\n",
        saving("test_all_ranks_know_of_one_that_could_not_write"),
    ),
    Mutation(
        "running: a living holder is taken for dead",
        LEASE,
        "        if lives:\n            found",
        "        if lives is None:\n            found",
        holding("test_the_second_is_refused_and_told_who_holds_it"),
    ),
    Mutation(
        "running: a number that another process has now is the holder",
        LEASE,
        'return started == holder["started"]',
        "return True",
        holding("test_a_number_that_now_is_another_process_is_dead"),
    ),
    Mutation(
        "running: a lease on another host is never waited for",
        LEASE,
        "            if now != before:\n                return True\n",
        "",
        holding("test_one_on_another_host_that_lives_is_refused"),
    ),
    Mutation(
        "running: a lease that is being written is of nobody",
        LEASE,
        "            holder = self._holder()\n",
        "            holder = read_mapping(self.path)\n",
        holding("test_one_that_is_being_written_is_of_whom_it_will_name"),
    ),
    Mutation(
        "running: a holder does not look whether the lease is still its own",
        LEASE,
        "                self._taken_by = found or {}\n",
        "                pass\n",
        holding("test_a_holder_that_was_suspended_finds_out"),
    ),
    Mutation(
        "running: another's lease is given back",
        LEASE,
        "if read_mapping(self.path) == self.own:",
        "if True:",
        holding("test_a_holder_that_was_suspended_finds_out"),
    ),
    Mutation(
        "running: the first moment is lost on another layout",
        ENGINE,
        "piece = whole[name].flatten()[source].to(flat)",
        'piece = whole[name].flatten()[source].to(flat) * (key != "exp_avg")',
        ELASTIC,
    ),
    Mutation(
        "running: AdamW's count begins anew on another layout",
        ENGINE,
        "torch.tensor(adamw_steps, device",
        "torch.tensor(0.0, device",
        ELASTIC,
    ),
    Mutation(
        "running: the schedule is one update behind on another layout",
        ENGINE,
        "rates = [base * f(updates) for base",
        "rates = [base * f(updates - 1) for base",
        ELASTIC,
    ),
    Mutation(
        "running: a rank takes the first rank's part of a moment",
        ENGINE,
        "first = self.ranks.rank * count",
        "first = 0",
        ("tests/lm/training/test_elastic.py::test_two_ranks_from_any_stage_to_any -m slow",),
    ),
    Mutation(
        "running: every micro-batch counts alike",
        ENGINE,
        "return [count / mean for count in counts]",
        "return [1.0 for _ in counts]",
        ("tests/lm/training/test_engine.py::test_a_micro_batch_counts_by_its_targets",),
    ),
    Mutation(
        "running: padding counts in the validation loss",
        ENGINE,
        "nll += output.loss.item() * targets",
        'nll += output.loss.item() * batch["labels"].numel()',
        ("tests/lm/training/test_engine.py::test_validation_is_the_mean_over_targets",),
    ),
    Mutation(
        "running: gradients of linear layers are rounded to bf16",
        "lm/training/deepspeed_json.py",
        'autocast.setdefault("lower_precision_safe_modules", [])',
        'autocast.setdefault("lower_precision_safe_modules", ["torch.nn.Linear"])',
        (
            "tests/lm/training/test_engine.py::"
            "test_gradients_are_accumulated_and_summed_in_fp32_under_bf16",
        ),
    ),
    Mutation(
        "running: wandb counts by its own step",
        "lm/runs/log.py",
        "self.run.log({**numbers, OUR_STEP: step})",
        "self.run.log(numbers, step=step)",
        ("tests/lm/runs/test_metrics.py::test_wandb_has_the_new_branch_after_a_rollback",),
    ),
    Mutation(
        "running: TensorBoard keeps a branch that was left",
        "lm/runs/log.py",
        "self._open(step + 1)",
        "self._open(None)",
        (
            "tests/lm/runs/test_metrics.py::"
            "test_after_a_rollback_tensorboard_has_the_new_branch_alone",
        ),
    ),
    Mutation(
        "running: a rollback keeps the spoilt gradients",
        TRAIN,
        "            self._build_with_finite_weights(named=False)\n",
        "            self.engine.load(found[0])\n",
        BACK,
    ),
    Mutation(
        "running: a rollback goes back in the data, too",
        TRAIN,
        "        self.batches.load_state_dict(after)\n",
        "",
        BACK,
    ),
    Mutation(
        "running: NaN is saved",
        LOOP,
        "        self.check_finite()\n        self.checkpoints.save(",
        "        self.checkpoints.save(",
        (f"{RECOVERY}test_nan_in_a_weight_or_a_moment_is_not_saved",),
    ),
    Mutation(
        "running: moments are not looked at",
        ENGINE,
        "held.setdefault(name, []).append(moment)",
        "pass",
        (f"{RECOVERY}test_nan_in_a_weight_or_a_moment_is_not_saved",),
    ),
    Mutation(
        "running: a rollback that failed goes back to the same checkpoint",
        LOOP,
        "self.rollbacks, self.went_back_to = made + 1, self.step",
        "self.rollbacks = made + 1",
        (f"{RECOVERY}test_what_fails_again_from_one_checkpoint_goes_back_to_the_one_before",),
    ),
    Mutation(
        "running: a sum that overflows is taken for NaN",
        CHECKPOINT,
        " and not all(torch.isfinite(t).all() for t in tensors)",
        "",
        saving("test_numbers_that_are_not_finite_are_found_and_named"),
    ),
    Mutation(
        "running: a file that has changed is not read again",
        CHECKSUMS,
        "stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns",
        "stat.st_size",
        (f"{VOUCHING}test_a_file_is_read_once_until_it_changes",),
    ),
    Mutation(
        "running: what is saved over an export is still vouched for",
        "lm/model/configuration_fprnn.py",
        "        forget(save_directory)\n",
        "",
        (f"{VOUCHING}test_what_a_user_saves_anew_is_not_refused",),
    ),
    Mutation(
        "running: a run's tokenizer is not compared with its checkpoint's",
        "lm/training/resume.py",
        "    check_tokenizer(path, manifest, run)\n    check_corpora",
        "    check_corpora",
        (f"{VOUCHING}test_a_changed_tokenizer_of_a_run_is_refused",),
    ),
    Mutation(
        "running: a run without its checkpoints begins anew",
        "lm/runs/run_dir.py",
        "                self._refuse_lost_checkpoints()\n",
        "                pass\n",
        (f"{VOUCHING}test_checkpoints_that_are_gone_are_not_a_new_beginning",),
    ),
]
