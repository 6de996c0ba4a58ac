# SPDX-License-Identifier: Apache-2.0
# bash completion of nixl-fetch, which knows its words itself.

_nixl_fetch()
{
    local cur prev words cword word
    COMPREPLY=()
    if declare -F _get_comp_words_by_ref >/dev/null; then
        # Keys and addresses hold colons; they are one word here.
        _get_comp_words_by_ref -n := cur prev words cword
    else
        words=("${COMP_WORDS[@]}")
        cword=$COMP_CWORD
        cur=${COMP_WORDS[COMP_CWORD]}
    fi
    while IFS=$'\t' read -r word _; do
        case $word in
        :files) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -X '!*.json' -- "$cur"; compgen -d -S / -- "$cur") ;;
        :any-files) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$cur") ;;
        :directories) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -d -- "$cur") ;;
        *) COMPREPLY+=("$word") ;;
        esac
    done < <("${words[0]}" __complete line "${words[@]:1:cword}" 2>/dev/null)
    ! declare -F __ltrim_colon_completions >/dev/null || __ltrim_colon_completions "$cur"
}
complete -o nosort -F _nixl_fetch nixl-fetch
