"""Cost to the client of checking answers under load."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
@pytest.mark.timing
@pytest.mark.parametrize("side,classes,batch", [(32, 10, 1), (224, 1000, 1)])
def test_checking_costs_the_client_at_most_3_percent(side: int, classes: int, batch: int) -> None:
    script = Path(__file__).with_name("_cost.py")
    command = [sys.executable, str(script), str(side), str(classes), str(batch)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout)
    print(found)
    assert found["ratio"] <= 1.03
