"""What each of ``farandole``'s commands does, a file for each group; `farandole.node.cli` names them."""
