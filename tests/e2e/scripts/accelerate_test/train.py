"""accelerate's own test of a cluster: random states, data loaders, training with every split of the batches."""

from accelerate.test_utils.scripts import test_script

if __name__ == "__main__":
    test_script.main()
