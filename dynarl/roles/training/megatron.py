"""Every name of Megatron-core that this project uses, in one place so that `megatron_cpu.install()` comes first."""

# ruff: noqa: E402, F401
import contextlib
import logging
import warnings

from dynarl.roles.training import megatron_cpu

# Megatron announces in every process that Transformer Engine and Apex are absent, that GPTModel will be replaced one
# day, and its whole configuration. A worker's log should begin with something useful.
logging.getLogger("megatron").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="megatron")
warnings.filterwarnings("ignore", "`torch.distributed.*is deprecated", FutureWarning)
megatron_cpu.install()

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

# Nothing is drawn at random here: no dropout, and weights come from files or other ranks. Megatron enters its named
# generators all the same, which would have to be seeded for every layout anew.
random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()
