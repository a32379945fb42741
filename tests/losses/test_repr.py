"""What a loss and a bank show of themselves where a model or a notebook prints them."""

from hf_infcl import ContrastiveLoss, HardNegativeLoss, MemoryBank, SigmoidLoss


def test_the_options_that_are_set_are_shown():
    common = "backend='auto', precision='auto'"
    assert repr(ContrastiveLoss()) == (
        f"ContrastiveLoss(duplicates='mask', direction='both', label_smoothing=0.0, {common})"
    )
    assert repr(SigmoidLoss(block_size=64)) == f"SigmoidLoss(block_size=64, {common})"
    assert repr(HardNegativeLoss(8, relative_margin=0.05)) == (
        f"HardNegativeLoss(k=8, direction='both', {common}, relative_margin=0.05)"
    )


def test_a_bank_is_shown_with_the_loss_that_reads_it():
    bank = MemoryBank(4, 2, group=False)
    assert repr(bank) == "MemoryBank(size=4, dim=2, dtype=torch.float32, filled=0)"
    assert repr(bank) in repr(ContrastiveLoss(bank=bank))
