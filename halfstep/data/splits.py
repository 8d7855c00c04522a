"""A split of samples into training and test data, by what the samples are called.

Which side a sample is on depends on its own key and the seed, through a hash, and not on its place
in a list: with one sample more or less, at most one other sample of its class changes sides.
"""

import hashlib
from collections import defaultdict
from collections.abc import Sequence

from halfstep.utils.checks import expect

DEFAULT_TEST_SHARE = 0.2
DEFAULT_SPLIT_SEED = 0
DIGEST_BYTES = 8  # of a key: 64 bits


def check_test_share(test_share: object) -> float:
    """The share as a float; a ValueError for what is no share."""
    is_number = isinstance(test_share, int | float) and not isinstance(test_share, bool)
    is_share = isinstance(test_share, int | float) and 0 < test_share < 1
    expect(is_number and is_share, "test_share", "a share between 0 and 1, as 0.2", test_share)
    assert isinstance(test_share, int | float)
    return float(test_share)


def split_rank(key: str | bytes, seed: int) -> int:
    """The place of a key in the order of this seed; the first of each class are test data."""
    content = key.encode(errors="surrogateescape") if isinstance(key, str) else key
    digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES, person=f"{seed:x}".encode()[-16:])
    return int.from_bytes(digest.digest(), "big")


def stratified_split(
    ranks: Sequence[int], labels: Sequence[int] | None, test_share: float
) -> tuple[list[int], list[int]]:
    """The numbers of the training and of the test samples, both in their given order.

    Of every class, `test_share` of the samples are test data, to nearest; at least one is, and at
    least one is not. The only sample of a class is training data. Without `labels` there is one
    class.
    """
    samples_by_class: dict[int, list[int]] = defaultdict(list)
    for sample in range(len(ranks)):
        samples_by_class[0 if labels is None else labels[sample]].append(sample)

    is_test = [False] * len(ranks)
    for samples in samples_by_class.values():
        test_count = min(max(1, round(test_share * len(samples))), len(samples) - 1)
        by_rank = sorted(samples, key=lambda sample: (ranks[sample], sample))
        for sample in by_rank[:test_count]:
            is_test[sample] = True
    train = [sample for sample, test in enumerate(is_test) if not test]
    test = [sample for sample, test in enumerate(is_test) if test]
    return train, test
