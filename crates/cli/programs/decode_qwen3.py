#!/usr/bin/env python3
"""A decoder for `kvferry bench --interference decode --decode-program`.

Decodes with a model of Qwen3-4B's sizes and random weights, one CUDA graph a step, and prints JSON
lines: first {"about": TEXT}, then for each step {"end_ns": WHEN, "step_ns": HOW LONG}. Times are of
the system's monotonic clock, which all processes share. It runs until nobody reads its output.

Needs PyTorch with CUDA. On a processor (--device cpu, with few layers) it shows the same lines.
"""

import argparse
import sys
import time

import torch
import torch.nn.functional as F

HIDDEN, HEADS, KV_HEADS, HEAD, MLP, VOCABULARY = 2560, 32, 8, 128, 9728, 151936
EPSILON, ROPE_BASE = 1e-6, 1e6


def norm(x, weight):
    return F.rms_norm(x, (x.shape[-1],), weight, EPSILON)


def rotate(x, cos, sin):
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class Layer:
    def __init__(self, batch, context, make):
        self.before, self.between = make.ones(HIDDEN), make.ones(HIDDEN)
        self.qkv = make.matrix((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN)
        self.q_norm, self.k_norm = make.ones(HEAD), make.ones(HEAD)
        self.out = make.matrix(HIDDEN, HEADS * HEAD)
        self.up = make.matrix(2 * MLP, HIDDEN)
        self.down = make.matrix(HIDDEN, MLP)
        self.keys = make.zeros(batch, KV_HEADS, context, HEAD)
        self.values = make.zeros(batch, KV_HEADS, context, HEAD)

    def step(self, x, place, cos, sin):
        batch = x.shape[0]
        heads = F.linear(norm(x, self.before), self.qkv).view(batch, -1, HEAD)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q = rotate(norm(q, self.q_norm), cos, sin)
        k = rotate(norm(k, self.k_norm), cos, sin)
        self.keys.index_copy_(2, place, k.unsqueeze(2))
        self.values.index_copy_(2, place, v.unsqueeze(2))
        seen = F.scaled_dot_product_attention(
            q.unsqueeze(2), self.keys, self.values, enable_gqa=True
        )
        x = x + F.linear(seen.reshape(batch, HEADS * HEAD), self.out)
        gate, up = F.linear(norm(x, self.between), self.up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down)


class Make:
    """Random weights on a device."""

    def __init__(self, device):
        self.options = {"device": device, "dtype": torch.bfloat16}

    def matrix(self, rows, columns):
        return torch.randn(rows, columns, **self.options) * columns**-0.5

    def ones(self, size):
        return torch.ones(size, **self.options)

    def zeros(self, *sizes):
        return torch.zeros(*sizes, **self.options)


class Model:
    def __init__(self, layers, batch, context, device):
        make = Make(device)
        self.embedding = make.matrix(VOCABULARY, HIDDEN)
        self.layers = [Layer(batch, context, make) for _ in range(layers)]
        self.norm = make.ones(HIDDEN)
        self.tokens = torch.zeros(batch, dtype=torch.long, device=device)
        # The attention is over the whole context, so the place of the new token changes nothing
        # about the work.
        self.place = torch.tensor([context // 2], device=device)
        angles = (context // 2) * ROPE_BASE ** (-torch.arange(0, HEAD, 2, device=device) / HEAD)
        self.cos, self.sin = angles.cos().bfloat16(), angles.sin().bfloat16()

    def step(self):
        x = F.embedding(self.tokens, self.embedding)
        for layer in self.layers:
            x = layer.step(x, self.place, self.cos, self.sin)
        logits = F.linear(norm(x, self.norm), self.embedding)
        self.tokens.copy_(logits.argmax(dim=-1))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=2048, help="tokens of each request's cache")
    options = parser.parse_args()
    torch.manual_seed(1)
    on_gpu = options.device.startswith("cuda")
    with torch.inference_mode():
        model = Model(options.layers, options.batch, options.context, options.device)
        step = model.step
        if on_gpu:
            torch.cuda.set_device(options.device)
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                for _ in range(3):
                    model.step()
            side.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                model.step()

            def step():
                with torch.cuda.stream(side):
                    graph.replay()
                side.synchronize()

        print(
            f'{{"about": "PyTorch {torch.__version__}: {options.layers} layers of Qwen3-4B, random '
            f"weights, {options.batch} requests of {options.context} tokens, "
            f'{"one CUDA graph" if on_gpu else "no graph"} a step"}}',
            flush=True,
        )
        while True:
            begin = time.monotonic_ns()
            step()
            end = time.monotonic_ns()
            print(f'{{"end_ns": {end}, "step_ns": {end - begin}}}', flush=True)


if __name__ == "__main__":
    try:
        main()
    except (BrokenPipeError, KeyboardInterrupt):
        sys.exit(0)
