"""`python -m model_store MODEL`: makes a model's folder ready and prints where it is."""

import sys

from model_store import ModelStoreError, resolve

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m model_store MODEL")
    try:
        print(resolve(sys.argv[1]))
    except ModelStoreError as error:
        sys.exit(str(error))
