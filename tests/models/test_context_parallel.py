import itertools

import numpy as np
import pytest

from tests import warm
from tests.models import sharing
from tests.train.job_run import write_model, write_rows
from trimtab.data.batches import Span
from trimtab.embedded.sort_task import make_rows
from trimtab.models.parallel.context_parallel import RowSharding

LONG_ROW = [Span(0, 257)]
PACKED = sharing.batch_of(sharing.PACKED).spans
BORROWED = sharing.batch_of(sharing.BORROWED).spans


@pytest.mark.parametrize("spans", [LONG_ROW, PACKED, BORROWED, [Span(0, 3)]])
@pytest.mark.parametrize("processes", [1, 2, 3, 4])
def test_every_token_is_worked_on_once_and_sees_its_sequence_up_to_itself(spans, processes):
    shares = RowSharding.of(spans, processes)
    rows = [shares.rows(process) for process in range(processes)]
    assert sorted(np.concatenate(rows).tolist()) == list(range(sum(s.length for s in spans)))
    assert max(map(len, rows)) == shares.longest and max(shares.counts) - min(shares.counts) <= 2
    owner_T, place_T = shares.places()
    for process in range(processes):
        assert (owner_T[rows[process]] == process).all()
        assert (place_T[rows[process]] == np.arange(shares.counts[process])).all()
        pieces = shares.pieces(spans, process)
        assert sum(piece.length for piece in pieces) == shares.counts[process]
        for piece in itertools.chain.from_iterable(whole.strips(5) for whole in pieces):
            own = rows[process][piece.first : piece.first + piece.length]
            seen = piece.key_rows(None)
            assert (seen[-piece.length :] == own).all() and (seen == piece.span.rows()[: len(seen)]).all()
            assert len(seen) == piece.keys(None)
            # With a window of 4 the first of them sees itself and three before.
            assert (piece.key_rows(4) == seen[max(0, len(seen) - piece.length - 3) :]).all()


@pytest.mark.parametrize(("spans", "processes"), [(LONG_ROW, 2), (LONG_ROW, 4), (PACKED, 2)])
def test_work_is_shared_out_evenly(spans, processes):
    shares = RowSharding.of(spans, processes)
    work = [
        sum(sum(range(piece.end - piece.length + 1, piece.end + 1)) for piece in shares.pieces(spans, process))
        for process in range(processes)
    ]
    assert max(work) < 1.15 * min(work)


QUICK = ["one key head", "three heads", "window", "one tied row", "checkpointing", "fewer tokens than chunks", "values"]


def test_two_processes_that_share_a_row_read_off_and_learn_what_one_does():
    assert warm.call_world(sharing.compare, 2, QUICK) == [0, 0]


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("gpt_oss", "GptOssForCausalLM: GptOssAttention has sinks or chunks"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM: Qwen3_5GatedDeltaNet keeps a state"),
        ("bloom", "BloomForCausalLM: BloomAttention does not use transformers' attention interface"),
    ],
)
def test_rows_that_cannot_be_shared_are_refused_before_training(family, why, tmp_path):
    write_model(tmp_path / "model", family)
    write_rows(tmp_path / "rows.jsonl", make_rows(4, 1))
    words = f"sft --pretrain {tmp_path}/model --dataset {tmp_path}/rows.jsonl --max_len 40 --save_path {tmp_path}/out"
    for said in warm.world_outputs([*words.split(), "--ring_attn_size", "2"], 2, 2):
        assert f"({why}); leave it out\n" in said or "error" not in said
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_so_do_they_in_every_other_way():
    assert warm.call_world(sharing.compare, 2, [name for name in sharing.CASES if name not in QUICK]) == [0, 0]


@pytest.mark.long
def test_so_do_four():
    assert warm.call_world(sharing.compare, 4, list(sharing.CASES)) == [0] * 4


@pytest.mark.long
def test_so_do_four_that_share_layers_too(tmp_path):
    cases = []
    for family, job, words in [
        ("llama", "sft", "--ring_head_stride 2"),
        ("qwen3", "sft", "--gradient_checkpointing"),
        ("mixtral", "sft", ""),
        ("llama", "rm", ""),
        ("llama", "sft", "--lora_rank 4"),
    ]:
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
        write_model(tmp_path / family, family, vocab_size=64, **heads)
        cases.append((job, str(tmp_path / family), words))
    assert warm.call_world(sharing.compare_loaded, 4, cases) == [0] * 4
