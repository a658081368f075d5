"""A loop of reinforcement learning: a sharded policy learns, another process generates with its weights.

    torchrun --nproc-per-node 2 examples/rl_loop.py --rounds 3

The trainer ranks shard a small transformers model. Rank 0 starts a generator, a process of its own with an
unsharded copy of the model, and a process group with it. A round is: stream the weights there, let it write
answers, score them (even tokens are good), update the policy. From the second round on only blocks that
changed travel. At the end policy and generator must choose the same tokens.
"""

import argparse
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import LlamaConfig, LlamaForCausalLM

from ragged_fsdp import fully_shard, weights

CONFIG = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
PROMPT, ANSWER, SAMPLES = 4, 12, 16
TIMEOUT = timedelta(seconds=60)


def generate(port: int, rounds: int, prompts: mp.Queue, answers: mp.Queue) -> None:
    """The other process: take the weights of a round, then answer its prompts."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    group = dist.ProcessGroupGloo(store, 1, 2, TIMEOUT)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).eval()
    tensors = dict(model.named_parameters())
    for number in range(rounds + 1):
        for bucket in weights.receive(group):
            bucket.apply(tensors)
        torch.manual_seed(number)
        options = {"do_sample": number < rounds, "pad_token_id": 0, "eos_token_id": None}
        answers.put(model.generate(prompts.get(), max_new_tokens=ANSWER, **options).tolist())
    prompts.get()  # stay until the answers have been taken


class Generator:
    """The trainer's end, on rank 0."""

    def __init__(self, rounds: int) -> None:
        context = mp.get_context("spawn")
        self.prompts, self.answers = context.Queue(), context.Queue()
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
        arguments = (store.port, rounds, self.prompts, self.answers)
        self.process = context.Process(target=generate, args=arguments, daemon=True)
        self.process.start()
        self.group = dist.ProcessGroupGloo(store, 0, 2, TIMEOUT)

    def answer(self, prompts: torch.Tensor) -> torch.Tensor:
        """Prompts with what the generator wrote behind them."""
        self.prompts.put(prompts)
        return torch.tensor(self.answers.get(timeout=TIMEOUT.total_seconds()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="updates of the policy")
    parser.add_argument("--lr", type=float, default=3e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    first = dist.get_rank() == 0
    torch.manual_seed(0)
    policy = LlamaForCausalLM(LlamaConfig(**CONFIG))
    for layer in policy.model.layers:
        fully_shard(layer)
    fully_shard(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=args.lr)
    stream = weights.stream(policy, delta=True)
    generator = Generator(args.rounds) if first else None

    for number in range(args.rounds + 1):
        weights.send(stream, generator.group if generator else None)
        torch.manual_seed(100 + number)
        prompts = torch.randint(1, CONFIG["vocab_size"], (SAMPLES, PROMPT))  # 0 is padding
        texts = generator.answer(prompts) if generator else torch.empty(SAMPLES, PROMPT + ANSWER).long()
        dist.broadcast(texts, src=0)
        mine = texts.chunk(dist.get_world_size())[dist.get_rank()]
        logits = policy(mine[:, :-1]).logits[:, PROMPT - 1 :]
        if number == args.rounds:
            behind = logits.amax(-1) - logits.gather(-1, mine[:, PROMPT:, None]).squeeze(-1)
            most = behind.max().detach()  # above 0 only by rounding: the generator decodes token by token
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
            if first:
                print(f"policy and generator choose the same tokens: {most.item() < 1e-5}", flush=True)
            break
        reward = (texts[:, PROMPT:] % 2 == 0).float().mean(dim=1)
        advantage = (reward - reward.mean()).chunk(dist.get_world_size())[dist.get_rank()]
        chosen = logits.log_softmax(-1).gather(-1, mine[:, PROMPT:, None]).squeeze(-1).sum(dim=1)
        (-(advantage * chosen).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if first:
            print(f"round {number}: mean reward {reward.mean().item():.3f}", flush=True)
    if generator:
        generator.prompts.put(None)
        generator.process.join(TIMEOUT.total_seconds())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
