"""Behind the last attention only the tokens that are kept go on. That they come out as transformers has them, in every family,
is in test_families.py."""

from kept_tokens import IDS, check_kept_tokens

from oracle import FAMILIES, Sequences, make_checkpoint, open_checkpoint


def test_a_model_of_transformers(tmp_path):
    make_checkpoint(FAMILIES["gemma2"], tmp_path)
    check_kept_tokens(open_checkpoint(tmp_path, "transformers"))


def test_the_others_do_no_work_in_the_last_layer(checkpoint):
    model = checkpoint("llama").model
    seen = []
    hooks = [block.mlp.register_forward_hook(lambda _, inputs, __: seen.append(len(inputs[0]))) for block in model.layers]
    Sequences(model, 2, 40).step([(0, IDS[0][:13]), (1, IDS[1][:30])], [1, 0])
    for hook in hooks:
        hook.remove()
    assert seen == [43] * (len(model.layers) - 1) + [1]
