#!/usr/bin/env bash
# What a GPU or TPU should measure first, in this order. Each command resumes what an earlier start
# has begun, and ends within its budget.
#
#   experiments/accelerator.sh DATA OUT
#
# DATA has the folders mnist and cifar10 with the data sets' original files. OUT receives the
# workdirs, and mnist.json and cifar10.json. On another machine this takes them into the tables:
#
#   python -m lamb_tpu.reproduce adopt OUT/mnist.json
set -euo pipefail
data=$1 out=$2
mkdir -p "$out"

# The first author's network on MNIST: five seeds of three optimizers.
python -m lamb_tpu.reproduce run lamb/mnist --scale=paper --cells=momentum,adamw,lamb --seeds=5 \
    --data="$data" --runs="$out/runs" --records="$out" --carry="$out/mnist.json" --budget=10m

# DavidNet on CIFAR-10 for the paper's 24 epochs: five optimizers.
python -m lamb_tpu.reproduce run lamb/cifar10 --scale=paper \
    --data="$data" --runs="$out/runs" --records="$out" --carry="$out/cifar10.json" --budget=10m

# A training step of BERT and of image networks beside PyTorch's; it needs the extras bench and
# interchange.
python -m experiments.bench.step --platform=gpu --write
