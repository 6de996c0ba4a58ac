#compdef nixl-fetch
# SPDX-License-Identifier: Apache-2.0
# zsh completion of nixl-fetch, which knows its words itself.

_nixl_fetch()
{
    local word description
    local -a items
    while IFS=$'\t' read -r word description; do
        case $word in
        :files) _files -g '*.json(-.)' -g '*(-/)' ;;
        :any-files) _files ;;
        :directories) _files -/ ;;
        *) items+=("${word//:/\\:}${description:+:$description}") ;;
        esac
    done < <($words[1] __complete line "${(@)words[2,CURRENT]}" 2>/dev/null)
    (( $#items == 0 )) || _describe nixl-fetch items
}

# Autoloaded, this file is the function; sourced, it registers it.
if [[ $funcstack[1] == _nixl-fetch ]]; then
    _nixl_fetch "$@"
elif (( $+functions[compdef] )); then
    compdef _nixl_fetch nixl-fetch
fi
