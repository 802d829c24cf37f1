"""Hugging Face's own common model and configuration suites, once per shape of TinyTFM.

`.ci/run hf-suites` copies this file beside the suites of the transformers source distribution
and runs it there; it cannot run from this folder.
"""

import unittest

from transformers.models.auto import modeling_auto

from modeling_tinytfm import (
    TinyTFMConfig,
    TinyTFMForCausalLM,
    TinyTFMForConditionalGeneration,
    TinyTFMForSequenceClassification,
    TinyTFMModel,
)

from .generation.test_utils import GenerationTesterMixin
from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor

# The suites choose inputs, labels and checks by class name; registering with the Auto classes
# does not add to these tables, and without the names most checks of the heads would be skipped.
for mapping, model_class in (
    (modeling_auto.MODEL_MAPPING_NAMES, TinyTFMModel),
    (modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES, TinyTFMForConditionalGeneration),
    (modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, TinyTFMForCausalLM),
    (
        modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        TinyTFMForSequenceClassification,
    ),
):
    mapping[TinyTFMConfig.model_type] = model_class.__name__


class TinyTFMTester:
    """What the suites ask of a model's tester: sizes, a configuration and a batch of inputs."""

    batch_size = 5
    seq_length = 7
    hidden_size = 16
    num_hidden_layers = 2
    num_attention_heads = 4
    is_training = True

    def __init__(self, **shape):
        self.settings = {
            "vocab_size": 99,
            "d_model": self.hidden_size,
            "encoder_layers": self.num_hidden_layers,
            "decoder_layers": self.num_hidden_layers,
            "encoder_attention_heads": self.num_attention_heads,
            "decoder_attention_heads": self.num_attention_heads,
            "encoder_ffn_dim": 32,
            "decoder_ffn_dim": 32,
            "max_position_embeddings": 64,
            **shape,
        }

    def get_config(self):
        return TinyTFMConfig(**self.settings)

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        inputs = self._sequences(config)
        if config.is_encoder_decoder:
            inputs |= {f"decoder_{name}": value for name, value in self._sequences(config).items()}
        return config, inputs

    def _sequences(self, config):
        input_ids = ids_tensor([self.batch_size, self.seq_length], config.vocab_size).clamp(min=4)
        attention_mask = input_ids.new_ones(input_ids.shape)
        attention_mask[0, -2:] = 0
        return {
            "input_ids": input_ids.masked_fill(attention_mask == 0, config.pad_token_id),
            "attention_mask": attention_mask,
        }


class CommonSuites(ModelTesterMixin):
    """Both suites for one shape."""

    is_encoder_decoder = False
    is_decoder = False
    # Off by default for models older than 2023 only: ours initialises every weight.
    test_can_init_all_missing_weights_before_2023 = True

    def setUp(self):
        self.model_tester = TinyTFMTester(
            is_encoder_decoder=self.is_encoder_decoder, is_decoder=self.is_decoder
        )
        self.config_tester = ConfigTester(
            self, config_class=TinyTFMConfig, **self.model_tester.settings
        )

    def test_config(self):
        self.config_tester.run_common_tests()


class EncoderDecoderTest(CommonSuites, GenerationTesterMixin, unittest.TestCase):
    is_encoder_decoder = True
    all_model_classes = (TinyTFMModel, TinyTFMForConditionalGeneration)


class DecoderOnlyTest(CommonSuites, GenerationTesterMixin, unittest.TestCase):
    is_decoder = True
    all_model_classes = (TinyTFMModel, TinyTFMForCausalLM)


class EncoderOnlyTest(CommonSuites, unittest.TestCase):
    all_model_classes = (TinyTFMModel, TinyTFMForSequenceClassification)
