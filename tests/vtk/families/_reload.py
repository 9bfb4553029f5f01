"""Run as a program: load packs, and write what is in them beside each, for a test to compare byte by byte."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
from tests.vtk.families import _table  # noqa: F401 - registers the small models
from vtk.packs.load import load_task

if __name__ == "__main__":
    torch.set_num_threads(1)
    for pack in sys.argv[1:]:
        state = load_task(pack).model.state_dict()
        save_file(
            {k: v.detach().clone().contiguous() for k, v in state.items()}, Path(pack).parent / "again.safetensors"
        )
