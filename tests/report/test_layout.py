import json

from tests.distributed.ray.test_placement import layout, of_each
from tests.report.pages import Checked, write_rl_run
from trimtab.report.page import write_report


def page_of(folder, rows) -> str:
    manifest = folder / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"layout": rows}))
    page = write_report(folder).read_text()
    Checked(page)
    return page


def test_a_run_on_a_cluster_shows_where_its_roles_were(tmp_path):
    run = write_rl_run(tmp_path / "run")
    assert "Where it ran" not in write_report(run).read_text()
    page = page_of(run, layout(f"{of_each(2)} colocate_actor_ref vllm_num_engines=2").rows("GPU"))
    assert "<h2>Where it ran</h2>" in page
    for cells in (("reference", "1", "2", "those of actor"), ("engines", "", "2", "2 x 1 GPU")):
        assert "".join(f"<td>{cell}</td>" for cell in cells) in page
    assert "layout" not in page.split("Versions and hashes")[1]


def test_odd_rows_of_a_layout_do_not_break_the_page(tmp_path):
    run = write_rl_run(tmp_path / "run")
    for rows in ("actor", [1, None], {"actor": 1}):
        assert "Where it ran" not in page_of(run, rows)
    assert "<td>&lt;b&gt;</td><td></td>" in page_of(run, [{"role": "<b>", "processes": []}])
