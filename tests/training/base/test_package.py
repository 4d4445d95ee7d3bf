import subprocess
import sys


def test_settings_and_presets_need_no_torch() -> None:
    code = "import sys, farandole.protocol.run.models, farandole.training.base.errors; print('torch' in sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert answer.stdout.strip() == "False"
