# SPDX-License-Identifier: Apache-2.0
# bash completion of nixl-fetch. Runs and keys are asked of the ranks, briefly.

# Options without a value.
_nixl_fetch_flags()
{
    _nixl_fetch_ask options "$1" | awk -F '\t' '$2 == "" { printf "%s ", $1 }'
}

# The words of the command line that matter to others: sets command, target, size.
_nixl_fetch_scan()
{
    local i word flags='--help --version'
    command='' target='' size=''
    for ((i = 1; i < COMP_CWORD_; i++)); do
        word=${words_[i]}
        case $word in
        --world-size | -n) size=${words_[i + 1]} ;;
        --world-size=*) size=${word#*=} ;;
        esac
        case $word in
        -*)
            [[ $word == *=* || " $flags " == *" $word "* ]] || ((i++))
            ;;
        *)
            if [ -z "$command" ]; then
                command=$word
                flags="-j -q -v -h $(_nixl_fetch_flags "$command")"
            elif [ -z "$target" ]; then
                target=$word
            fi
            ;;
        esac
    done
}

_nixl_fetch_ask()
{
    "${words_[0]}" __complete "$@" 2>/dev/null
}

_nixl_fetch()
{
    local cur prev command target size COMP_CWORD_ words_ cword words
    COMPREPLY=()
    if declare -F _get_comp_words_by_ref >/dev/null; then
        # Keys and addresses hold colons; they are one word here.
        _get_comp_words_by_ref -n := cur prev words cword
        words_=("${words[@]}")
        COMP_CWORD_=$cword
    else
        words_=("${COMP_WORDS[@]}")
        COMP_CWORD_=$COMP_CWORD
        cur=${COMP_WORDS[COMP_CWORD]}
        prev=${COMP_WORDS[COMP_CWORD - 1]}
    fi
    _nixl_fetch_scan
    if [ -z "$command" ]; then
        mapfile -t COMPREPLY < <(compgen -W "$(_nixl_fetch_ask commands) help --help --version" -- "$cur")
        return
    fi
    case $prev in
    --path) mapfile -t COMPREPLY < <(compgen -W 'auto stream cma rdma cuda_ipc' -- "$cur") ;;
    --model | -m) mapfile -t COMPREPLY < <(_nixl_fetch_ask models "$cur") ;;
    --adapter-shape) mapfile -t COMPREPLY < <(_nixl_fetch_ask shapes "$cur") ;;
    --dtype) mapfile -t COMPREPLY < <(compgen -W 'bf16 f16 f32 f64 f8_e4m3 f8_e5m2 i8 u8' -- "$cur") ;;
    --out | -o | --dir | --adapter) mapfile -t COMPREPLY < <(compgen -d -- "$cur") ;;
    --dest) mapfile -t COMPREPLY < <(compgen -W 'memory device:0' -- "$cur" && compgen -d -- "$cur") ;;
    --cast | --pull-dtype) mapfile -t COMPREPLY < <(compgen -W 'bf16 f16' -- "$cur") ;;
    --trainer-load) mapfile -t COMPREPLY < <(compgen -W 'product sweep' -- "$cur") ;;
    --info) mapfile -t COMPREPLY < <(compgen -f -- "$cur") ;;
    --run) mapfile -t COMPREPLY < <(_nixl_fetch_ask runs "$cur" "$target" "$size") ;;
    --timeout | -t | --world-size | -n | --server-name | --expect-world-id | --step | -s | --min-step | \
        --max-attempts | --count | -c | --update-every | --steps | --first-step | --ready-fd | --r | -r | \
        --base-port | -p | --replicate | --shard-dim | --lease-ms | --bind | --allow | --name | \
        --world-id | --iterations | -i | -d) ;;
    *)
        if [[ $cur == -* ]]; then
            mapfile -t COMPREPLY < <(compgen -W "$(_nixl_fetch_ask options "$command" | cut -f 1)" -- "$cur")
        elif [ "$command" = show ] && { [ -n "$target" ] || [ -n "${NIXL_FETCH_SERVERS-}${FANIN_TRAINER-}" ]; }; then
            mapfile -t COMPREPLY < <(_nixl_fetch_ask keys "$cur" "$target" "$size")
            ! declare -F __ltrim_colon_completions >/dev/null || __ltrim_colon_completions "$cur"
        elif [ -z "$target" ] && [ "$command" != serve ]; then
            mapfile -t COMPREPLY < <(compgen -f -X '!*.json' -- "$cur" && compgen -d -S / -- "$cur")
        fi
        ;;
    esac
}
complete -o nosort -F _nixl_fetch nixl-fetch
