"""The commands of ``farandole``, a file for each group; `farandole.node.cli` names them."""
