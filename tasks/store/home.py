"""Where cram keeps artifacts and Prefect's data: in its checkout, or in the working directory if there is none."""

import os
from pathlib import Path

CODE = Path(__file__).resolve().parents[2]  # the directory with flows/, tasks/ and model/
IN_CHECKOUT = (CODE / "prefect.yaml").is_file()  # not after `pip install DIR`: then it is site-packages
HOME = CODE if IN_CHECKOUT else Path.cwd()
STATE = Path(os.environ.get("PREFECT_HOME") or HOME / ".prefect").expanduser().absolute()  # Prefect's data
ROOT = Path(os.environ.get("CRAM_ARTIFACTS") or HOME / "artifacts").expanduser().resolve()  # bound at import
is_frozen = False  # set by a process that only plans: nothing in the store may change
