from tests.distributed.ray.test_placement import layout, of_each
from tests.report.pages import change_manifest, page_of, write_rl_run


def page_with(folder, rows) -> str:
    change_manifest(folder, layout=rows)
    return page_of(folder)


def test_a_run_on_a_cluster_shows_where_its_roles_were(tmp_path):
    run = write_rl_run(tmp_path / "run")
    assert "Where it ran" not in page_of(run)
    page = page_with(run, layout(f"{of_each(2)} colocate_actor_ref vllm_num_engines=2").rows("GPU"))
    assert "<h2>Where it ran</h2>" in page
    for cells in (("reference", "1", "2", "those of actor"), ("engines", "", "2", "2 x 1 GPU")):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert "layout" not in page.split("Versions and hashes")[1]


def test_odd_rows_of_a_layout_do_not_break_the_page(tmp_path):
    run = write_rl_run(tmp_path / "run")
    for rows in ("actor", [1, None], {"actor": 1}):
        assert "Where it ran" not in page_with(run, rows)
    assert "<td>&lt;b&gt;</td><td></td>" in page_with(run, [{"role": "<b>", "processes": []}])
