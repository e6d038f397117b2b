"""What one replica's engine takes of a GPU's memory. Pure: a checkpoint's ``config.json`` goes in, bytes come out."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Memory of one engine worker (one GPU) of a replica; of the fullest worker where they differ.

    ``utilization``: the engine's ``gpu_memory_utilization``, a share of the whole GPU, weights and KV cache together.
    ``weights``, ``working``: bytes of the weights and of everything else that is no KV cache (peak activations, CUDA
    graphs, the CUDA context). ``kv_per_token``: bytes of KV cache per token, this worker's share of it.
    ``context``: the longest sequence in tokens. ``max_num_seqs``: sequences that the engine runs at once.
    """

    utilization: float
    weights: int
    working: int
    kv_per_token: float
    context: int
    max_num_seqs: int

    def kv_tokens(self, gpu_bytes: int) -> int:
        """Tokens that the KV cache holds on a GPU of so many bytes; 0 where not even the weights fit."""
        room = gpu_bytes * self.utilization - self.weights - self.working
        return max(0, int(room / self.kv_per_token))

    def full_sequences(self, gpu_bytes: int) -> float:
        """How many sequences of full context fit at once: vLLM's "maximum concurrency". Below 1 it refuses to start."""
        return self.kv_tokens(gpu_bytes) / self.context
