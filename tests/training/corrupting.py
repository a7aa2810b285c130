"""`python -m tests.training.corrupting VERSION train CONFIG ...`: a run whose weights lose a bit on their way out, in
every bucket of that weight version."""

import sys

from gspo_megatron.__main__ import main
from gspo_megatron.rollout.transports.distributed import DistributedTransport


def corrupt(version: int) -> None:
    begin, send_bucket = DistributedTransport.begin, DistributedTransport.send_bucket

    def remember(self, number):
        self.version_under_way = number
        begin(self, number)

    def flip(self, bucket):
        if self.version_under_way == version:
            bucket.flat[-1] ^= 1
        send_bucket(self, bucket)

    DistributedTransport.begin, DistributedTransport.send_bucket = remember, flip


if __name__ == "__main__":
    corrupt(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
