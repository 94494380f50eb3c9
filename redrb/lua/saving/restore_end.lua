-- Replace an unused task by its complete stage, in one step whose cost does not grow with the groups.
-- KEYS[1] stream
-- ARGV    token, entries, facts, then of each consumer group: name, members of its pools
--         numbers of entries, facts and members that a complete stage has
-- Returns {'ok'} | {'gone'}: the stage is not complete | {'used'}: something was put meanwhile
--       | {'differs', setting, ...}: the task was given other settings meanwhile
--@include task pools membership settings stage

begin_writing()
local token = ARGV[1]
if redis.call('HGET', task, 'restored') == token then
  return {'ok'}
end

local function is_complete()
  if redis.call('XLEN', stream) ~= tonumber(ARGV[2])
    or redis.call('HLEN', key('facts')) ~= tonumber(ARGV[3]) then
    return false
  end
  for i = 4, #ARGV, 2 do
    local members = 0
    for _, status in ipairs(STATUSES) do
      members = members + redis.call('ZCARD', key('ready', pool_of(ARGV[i], status)))
    end
    if members ~= tonumber(ARGV[i + 1]) then
      return false
    end
  end
  return exists()
end

local here, settings = redis.call('HGETALL', task), {}
for i = 1, #here, 2 do
  settings[here[i]] = here[i + 1]
end
if number(puts, 'put') + tonumber(settings.filtered or '0')
  + tonumber(settings.arrived_stale or '0') > 0
  or redis.call('XLEN', stream) + redis.call('XLEN', key('dead')) > 0 then
  return {'used'}
end
local joined = groups()
work_at(stage_of(token))
if not is_complete() then
  return {'gone'}
end
local differs = {'differs'}
for _, name in ipairs(SETTINGS) do
  local here_only = name == 'revision' or name == 'incarnation'
  if not here_only and settings[name] and settings[name] ~= redis.call('HGET', task, name) then
    differs[#differs + 1] = name
  end
end
if #differs > 1 then
  return differs
end
local version = tonumber(settings.version or '')
if version and version > number(task, 'version') then
  redis.call('HSET', task, 'version', settings.version)
end
redis.call('HDEL', task, 'part')
-- an incarnation into which nothing was put has no ids yet, so the restored task may go on with it
redis.call('HSET', task, 'restored', token, 'revision', token,
  'incarnation', settings.incarnation or token)
pack_rules()
local names = names_of_keys()

work_at(home)
delete_task(joined)
redis.call('DEL', key('restoring'))
for _, name in ipairs(names) do
  local staged = stage_of(token) .. name
  if redis.call('PERSIST', staged) == 1 or redis.call('EXISTS', staged) == 1 then
    redis.call('RENAME', staged, prefix .. name)
  end
end
work_at(home) -- the rules are those of the restored task now
for _, group in ipairs(joined) do
  join(group) -- consumer groups that joined meanwhile; their next calls add the other pages
end
return {'ok'}
