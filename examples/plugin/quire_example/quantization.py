"""A quantization method: matrices of -1, 0 and 1 with a scale for each output.

config.json says `"quantization_config": {"quant_method": "ternary"}`. Of a matrix, the checkpoint has `values` [outputs,
inputs] int8 and `scale` [outputs] float32.
"""

from quire.config.quantization_methods import QuantizationMethod

TERNARY = QuantizationMethod("ternary", "quire_example.ternary:TernaryScheme", names=("b1.58",), tensors={"values": 8})
