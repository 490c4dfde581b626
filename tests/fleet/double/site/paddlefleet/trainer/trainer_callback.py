"""What the trainer does to the experts around a step."""

from paddlefleet.transformer.moe.moe_expert import SonicMoEExpert


class SonicMoELayoutSwitchCallback:
    """`on_step_begin` before the first micro-batch, `on_optimizer_begin` after the last."""

    def on_step_begin(self, args, state, control, *, model, optimizer, **kwargs):
        if not args.using_sonic_moe:
            return
        if not args.fp8:
            _apply(model, "convert_weights_to_sonic_layout")
            return
        _apply(model, "convert_weights_to_sonic_layout", "quant_weight")
        # Masters are made as the storage goes, and belong to the grouped layout.
        if not self._has_masters(optimizer):
            _apply(model, "convert_weights_to_grouped_layout")
        optimizer.clear_param_storage("moe_expert")

    def on_optimizer_begin(self, args, state, control, *, model, **kwargs):
        if args.using_sonic_moe:
            if args.fp8:
                _apply(model, "clear_fp8_weights")
            _apply(model, "convert_weights_to_grouped_layout")

    def _has_masters(self, optimizer):
        for parameter in optimizer._inner_opt._parameter_list:
            color = getattr(parameter, "color", -1)
            if isinstance(color, dict) and color.get("color") == "moe_expert":
                return parameter.name in optimizer._master_weights
        return False


def _apply(model, *names):
    def call(layer):
        if isinstance(layer, SonicMoEExpert):
            for name in names:
                getattr(layer, name)()

    model.apply(call)
