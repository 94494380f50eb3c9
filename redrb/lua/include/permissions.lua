-- Refuses a user who may not run all commands of a script, before the script has written anything.
-- Redis checks each command only when the script calls it, and keeps what was written before.

-- The first command that the user may not run on the key `name`, or nil. Servers refuse to say it for fewer
-- words than the command needs, so the key stands for all further ones.
local function forbidden_command(name)
  local commands = {} -- filled by redrb/lua/scripts.py
  for _, command in ipairs(redis.acl_check_cmd and commands or {}) do
    local named = #command
    for i = named + 1, command.words do -- bound: 6 words, of XCLAIM
      command[i] = name
    end
    if not redis.acl_check_cmd(unpack(command)) then
      return table.concat(command, ' ', 1, named)
    end
  end
  return nil
end

-- Raise an error if the user may not run one of the commands.
local function check_permissions(name)
  local command = forbidden_command(name)
  if command then
    local may = redis.acl_check_cmd
    local reads = may('hget', name, name) and not may('hset', name, name, name)
    error({err = 'NOPERM this user may ' .. (reads and 'only read: it may ' or '') .. 'not run ' .. command
      .. ' on ' .. name .. ', which is needed; nothing was changed'})
  end
end
