"""TinyTFM: the original Transformer, registered with the Auto classes of transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
)

from .configuration_tinytfm import TinyTFMConfig
from .modeling_tinytfm import (
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    TinyTFMModel,
    TinyTFMPreTrainedModel,
)
from .translation import translate

__all__ = [
    "TinyTFMConfig",
    "TinyTFMForCausalLM",
    "TinyTFMForConditionalGeneration",
    "TinyTFMForSequenceClassification",
    "TinyTFMModel",
    "TinyTFMPreTrainedModel",
    "translate",
]

AutoConfig.register("tinytfm", TinyTFMConfig, exist_ok=True)
TinyTFMConfig.register_for_auto_class()
for auto_class, model_class in (
    (AutoModel, TinyTFMModel),
    (AutoModelForSeq2SeqLM, TinyTFMForConditionalGeneration),
    (AutoModelForCausalLM, TinyTFMForCausalLM),
    (AutoModelForSequenceClassification, TinyTFMForSequenceClassification),
):
    auto_class.register(TinyTFMConfig, model_class, exist_ok=True)
    # Saving a model copies the two files that make it load without this package.
    model_class.register_for_auto_class(auto_class.__name__)
