from trimtab.train.metrics import MetricsFile, read_rows


def write(path, steps, resume_from=None):
    file = MetricsFile(path, resume_from=resume_from)
    for step in steps:
        file.write({"step": step, "loss": 1.0 / step})
    file.close()


def test_resuming_removes_rows_after_the_checkpoint_and_a_half_written_one(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 8))
    with path.open("a") as file:
        file.write('{"step": 8, "lo')
    write(path, range(5, 10), resume_from=4)
    assert [row["step"] for row in read_rows(path)] == list(range(1, 10))


def test_a_new_run_in_an_old_folder_keeps_the_old_curve_aside(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for count in (2, 3, 4):
        write(path, range(1, count + 1))
    assert len(read_rows(path)) == 4
    assert [len(read_rows(tmp_path / f"metrics.{n}.jsonl")) for n in (1, 2)] == [2, 3]
