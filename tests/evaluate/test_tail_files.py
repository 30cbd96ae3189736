import pickle

import numpy as np
import pytest
import torch

from trimtab.errors import UserError
from trimtab.evaluate.tail_risk import (
    Analytic,
    HeldOut,
    read_analytic,
    read_bad_texts,
    read_held_out,
    summary,
    write_analytic,
    write_bad_texts,
    write_held_out,
    write_summary,
    write_updates,
)


def held_out(n=20):
    rng = np.random.default_rng(0)
    return HeldOut(*(rng.normal(size=n).astype(np.float32) for _ in range(4)))


def test_what_is_written_is_read_back_and_is_the_documented_tuple(tmp_path):
    samples = held_out()
    path = write_held_out(tmp_path / "info", "run_s1", samples)
    assert path.name == "info_eval_run_s1"
    for field, vector, raw in zip(vars(samples), vars(read_held_out(path)).values(), torch.load(path)):
        np.testing.assert_array_equal(vector, getattr(samples, field))
        assert torch.is_tensor(raw) and raw.shape == (20,)
    measured = Analytic([-3.0, -4.0], [0.1, 0.2], [])
    path = write_analytic(tmp_path, "run_s1", Analytic(np.array([-3.0, -4.0]), [np.float64(0.1), 0.2], []))
    assert path.name == "analyticlogprob_rewsample_run_s1" and read_analytic(path) == measured
    assert torch.load(write_updates(tmp_path, "r", [0.5])) == ([], [0.5], [], [])


def test_bad_texts_keep_their_name_and_come_back_as_a_set(tmp_path):
    path = write_bad_texts(tmp_path, "run", ["b", "a", "a"], -5.0)
    assert path.name == "neg_data_run_thr-5.0.pkl"
    assert read_bad_texts(path) == {"a", "b"} == pickle.loads(path.read_bytes())


def test_a_file_that_would_run_code_is_refused_by_both_readers(tmp_path):
    class Trap:
        def __reduce__(self):
            return (tmp_path.joinpath("sprung").touch, ())

    (tmp_path / "bad.pkl").write_bytes(pickle.dumps({Trap()}))
    torch.save((Trap(), [], [], []), tmp_path / "info_eval_x")
    for read, name in ((read_bad_texts, "bad.pkl"), (read_held_out, "info_eval_x")):
        with pytest.raises(UserError, match=name):
            read(tmp_path / name)
    assert not (tmp_path / "sprung").exists()


def test_missing_and_misshapen_files_are_told_in_one_line(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_held_out(tmp_path / "info_eval_none")
    torch.save(([1.0], [1.0, 2.0], [1.0], [1.0]), tmp_path / "info_eval_uneven")
    with pytest.raises(UserError, match="different lengths"):
        read_held_out(tmp_path / "info_eval_uneven")
    with pytest.raises(UserError, match="3 lists"):
        read_analytic(tmp_path / "info_eval_uneven")


def test_the_summary_has_every_threshold_and_level_asked_for(tmp_path):
    samples = HeldOut(np.array([-6.0, -4.0, 0.0, 2.0]), *(np.zeros(4) for _ in range(3)))
    figures = summary(samples, [-5, -1], [0.25, 0.5])
    assert {t: f["value"] for t, f in figures["below"].items()} == {"-5": 0.25, "-1": 0.5}
    assert [(f["value"], f["k"]) for f in figures["cvar"].values()] == [(-6.0, 1), (-5.0, 2)]
    assert figures["worst_reward"] == -6 and figures["reward"]["value"] == -2
    assert '"below"' in write_summary(tmp_path, "run", figures).read_text()
