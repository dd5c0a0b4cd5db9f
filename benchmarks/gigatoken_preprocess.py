r"""Write a dataset from JSON lines with the package gigatoken, for comparison in ``preprocess.py``.

    python gigatoken_preprocess.py --input FILE.jsonl --output-prefix PREFIX --vocab-file V --merge-file M \
        --append-eod --workers N

This is the minimum around the package: the whole file is held in memory, and errors do not name the line that
is not a document. The writer is this project's.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path


def main() -> None:
    """Read the documents, encode them, and write the dataset."""
    parser = argparse.ArgumentParser()
    for flag in ("--input", "--output-prefix", "--vocab-file", "--merge-file", "--tokenizer-type"):
        parser.add_argument(flag)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--append-eod", action="store_true")
    arguments = parser.parse_args()
    os.environ["RAYON_NUM_THREADS"] = str(arguments.workers)  # before the package starts its threads
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: arguments.workers])

    import gigatoken
    import numpy as np
    from tokenizers import ByteLevelBPETokenizer

    from megatron_npu.data.preprocessing import indexed_dataset

    slow = ByteLevelBPETokenizer(arguments.vocab_file, arguments.merge_file)
    end = slow.token_to_id("<|endoftext|>")
    with tempfile.TemporaryDirectory() as folder:
        slow.save(str(Path(folder) / "tokenizer.json"))
        tokenizer = gigatoken.Tokenizer.from_json((Path(folder) / "tokenizer.json").read_text())
    source = gigatoken.JsonlFileSource([arguments.input], "text")
    documents = tokenizer.encode_files(source, parallel=arguments.workers > 1)

    import awkward

    lengths = awkward.to_numpy(awkward.num(documents)).astype(np.int64)
    tokens = awkward.to_numpy(awkward.flatten(documents)).astype(np.uint16)
    counts = (lengths > 0).astype(np.int64)
    if arguments.append_eod:
        tokens = np.insert(tokens, np.cumsum(lengths)[lengths > 0], end)
        lengths = lengths + counts
    prefix = f"{arguments.output_prefix}_text_document"
    with indexed_dataset.Writer(prefix, np.dtype(np.uint16)) as writer:
        writer.add(tokens.tobytes(), lengths[lengths > 0].astype(np.int32), counts)
        writer.finish()
        indexed_dataset.publish([writer])


if __name__ == "__main__":
    main()
