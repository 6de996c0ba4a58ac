# SPDX-License-Identifier: Apache-2.0
# fish completion of nixl-fetch, which knows its words itself.

function __nixl_fetch
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in ($words[1] __complete line $words[2..-1] "$current" 2>/dev/null)
        switch $line
            case :files
                __fish_complete_suffix "$current" .json
            case :any-files
                __fish_complete_path "$current"
            case :directories
                __fish_complete_directories "$current"
            case '*'
                echo $line
        end
    end
end
complete -c nixl-fetch -f -a '(__nixl_fetch)'
