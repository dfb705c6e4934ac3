"""Micro-batches, which are read, masked and sent to the device one ahead."""

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor

from model.detection import corrupt
from model.masking import Corpus, mask
from model.settings import Training

# tokens (B, S), positions (B, K) and labels (B, K), int64; with detection also what is corrupted, (B, S), fp32
Batch = tuple[Tensor, ...]


class Batches:
    """The corpus in order, epoch after epoch, `size` sequences at a time. A thread prepares the next micro-batch."""

    def __init__(self, corpus: Corpus, size: int, training: Training, device: torch.device) -> None:
        self.corpus, self.size, self.training, self.device = corpus, size, training, device
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self.next: tuple[tuple[int, int], Future[Batch]] | None = None

    def make(self, first: int, masks: int) -> Batch:
        """The micro-batch from sequence `first`, counted over all epochs, with `masks` tokens of each to predict."""
        rows = np.arange(first, first + self.size) % len(self.corpus.sequences)
        tokens_BS, training = self.corpus.sequences[rows], self.training
        parts = mask(tokens_BS, first, masks, self.corpus, training.seed, training.masked_share)
        if training.detection:
            masked_BS, positions_BK, labels_BK = parts
            changed_BS, corrupted_BS = corrupt(masked_BS, tokens_BS, positions_BK, first, self.corpus, training)
            parts = changed_BS, positions_BK, labels_BK, corrupted_BS
        tensors = (torch.from_numpy(part) for part in parts)
        if self.device.type == "cuda":
            return tuple(tensor.pin_memory().to(self.device, non_blocking=True) for tensor in tensors)
        return tuple(tensors)

    def take(self, first: int, masks: int, after: int) -> Batch:
        """The same; then starts to make the micro-batch from sequence `after`, which is likely to be taken next."""
        asked, future = self.next or ((-1, -1), None)
        batch = future.result() if asked == (first, masks) else self.make(first, masks)
        self.next = (after, masks), self.thread.submit(self.make, after, masks)
        return batch

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown(cancel_futures=True)
