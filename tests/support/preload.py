"""What the test processes' fork server imports: slow to import, and free of threads afterwards."""

import boto3
import pyarrow.parquet
import torch
import transformers.models.llama.modeling_llama
import zmq

import dflash.training.group

__all__ = ["boto3", "dflash", "pyarrow", "torch", "transformers", "zmq"]
