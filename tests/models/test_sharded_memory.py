"""While a model is loaded, scores and is saved, no process holds much more than its share of it."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM

from tests import warm
from tests.models.splitting import load_split, options_of, some_batch, values
from trimtab.data.tokenizer import load_tokenizer
from trimtab.distributed.device import find_device
from trimtab.distributed.fsdp import local
from trimtab.distributed.process_group import find_world, leave_world
from trimtab.embedded.sort_task import make_tokenizer
from trimtab.models.load import load_frozen_policy
from trimtab.models.packed import scoring
from trimtab.models.parallel import sharded_checkpoint
from trimtab.models.parallel.sharded_checkpoint import SafetensorsWriter
from trimtab.models.parallel.sharded_model import mesh_of
from trimtab.models.save import save_model

MIB = 2**20
SLACK = 200e6
SIZES = {
    **{"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 48},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 8192},
}
FILES = 3


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A model of 1.1 GB in bf16, written tensor by tensor."""
    folder = tmp_path_factory.mktemp("large")
    config = LlamaConfig(**SIZES, bos_token_id=1, eos_token_id=2, pad_token_id=0, dtype="bfloat16")
    with torch.device("meta"):
        tensors = LlamaForCausalLM(config).bfloat16().state_dict()
    places, generator = {}, torch.Generator().manual_seed(0)
    for number in range(FILES):
        file = f"model-{number + 1:05d}-of-{FILES:05d}.safetensors"
        mine = dict(list(tensors.items())[number::FILES])
        stream = SafetensorsWriter(folder / file, mine)
        for name, tensor in mine.items():
            drawn = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5
            stream.write(name, (drawn if tensor.ndim > 1 else 1 + drawn).bfloat16())
        stream.close()
        places |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 1e9
    return folder


@pytest.mark.long
@pytest.mark.parametrize("words", ["", "--bf16 --lora_rank 8"])
@pytest.mark.parametrize("processes", [2, 4])
def test_no_process_holds_more_than_its_share_a_layer_and_a_little(large, tmp_path, processes, words):
    assert warm.call_world(measure, processes, str(large), words, tmp_path) == [0] * processes
    figures = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(processes)]
    for rank, found in enumerate(figures):
        mib = {name: round(size / MIB) for name, size in found.items()}
        print(f"{processes} processes, {words or 'full'}, rank {rank}: {mib} MiB")
    whole = figures[0]["whole"]
    for found in figures:
        assert found["share"] == pytest.approx(whole / processes, rel=0.01)
        assert found["peak"] < found["share"] + found["layer"] + SLACK
        assert found["peak"] < 0.8 * whole or processes == 2
    alone = load_frozen_policy(str(large), options_of("sft", str(large), words), find_device())
    with scoring(alone.model):
        assert torch.equal(torch.load(tmp_path / "values.pt"), values(alone.model, some_batch()))


def measure(model, words, folder):
    options = options_of("sft", model, words)
    mesh = mesh_of(options, find_world(find_device()))
    tokenizer, rank = load_tokenizer(model), mesh.all.rank
    sharded_checkpoint.FILE_BYTES = 300 * 10**6
    with Peak() as peak:
        loaded = load_split("sft", options, mesh)
        with scoring(loaded.model):
            found = values(loaded.model, some_batch())
        save_model(loaded.model, tokenizer, folder / "saved", mesh=mesh, bf16=options.bf16)
    parameters = list(loaded.model.parameters())
    layer = loaded.model.inner.model.layers[0].parameters()
    figures = {
        "whole": sum(p.numel() * p.element_size() for p in parameters),
        "share": sum(local(p).nbytes for p in parameters),
        "layer": sum(p.numel() * p.element_size() for p in layer),
        "peak": peak.most - peak.before,
    }
    (folder / f"{rank}.json").write_text(json.dumps(figures))
    if rank == 0:
        torch.save(found, folder / "values.pt")
    compare_with_files(loaded.model.inner, Path(model), mesh.size, rank)
    if not options.lora_rank:
        mesh.all.wait()
        compare_saved(folder / "saved", Path(model), mesh.size, rank)
    leave_world()


def compare_with_files(model, folder, size, rank):
    """Every part is what is cut of the whole tensor."""
    parameters = {name.replace(".base_layer", ""): p for name, p in model.named_parameters() if "lora_" not in name}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict)
                parts = file.get_tensor(name).to(parameters[name].dtype).chunk(size)
                assert torch.equal(local(parameters.pop(name)), parts[rank]), name
    assert not parameters


def compare_saved(saved, folder, size, rank):
    """Each process looks at its share of the tensors."""
    places = json.loads((saved / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(places.values())) > size
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys())[rank::size]:
                with safe_open(saved / places[name], framework="pt") as other:
                    assert torch.equal(other.get_tensor(name), file.get_tensor(name).float()), name


class Peak:
    """The most memory that is this process's own: mapped files are not."""

    def __enter__(self):
        self.before = self.most = private_memory()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self):
        while not self._ended.is_set():
            self.most = max(self.most, private_memory())
            time.sleep(0.002)

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()


def private_memory():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])
