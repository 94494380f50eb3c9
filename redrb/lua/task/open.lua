-- Create the task, or check that it has these settings. Removes old records of producers.
-- KEYS[1] stream
-- ARGV    revision, create, who, incarnation, generation, name, value, ...
--         revision: random name of the settings, if this call changes them, and of the incarnation of the
--         task, if this call creates it
--         create: 1 to create a task that does not exist, else 0
--         who: the caller, for the record of changes
--         incarnation: of the task that the caller has open, '' for none: in this incarnation the settings
--         that the caller gives are not looked at, because others may have changed them since
--         generation: the number of changes that the caller knows of, '' if it opens the task for the first
--         time; in a task that was created anew the settings of whoever knows of more changes hold, and a
--         value of '' says that the setting was removed
--         a setting that the task was not given yet is added to it; default_<name>: value of a setting
--         until it is given, kept from the first call; implied:<name>: value of a setting that no user gave,
--         '' for none, which replaces only such a value; an order by which the stored groups cannot be sorted
--         differs; configured:<name>: the same of a setting that task/configure has changed, as the caller
--         has learned it
-- Returns {'ok', name, value, ..., 'epoch', epoch, 'generation', changes, 'configured', names, 'held',
--         names, 'removed', incarnation and who, 'unfinished', '1' or ''} with all settings and the epoch of
--         the producers' records; configured: the settings that task/configure has changed; held: those of
--         them that the caller gave another value; removed: the incarnation that was removed last, and by
--         whom; if work is unfinished, run task/fill until it is done
--       | {'unknown'}: there is no such task, and it is not to be created
--       | {'differs', name, stored value, ...}
--       | {'unversioned'}: it is to evict the stalest groups, and indexes no versions
--       | {'blocked', name, value, groups, 1 or 0}: the limit or capacity is smaller than the groups that a
--         first take needs by the rate: takes and puts would wait for each other; groups is 0 if the rate
--         leaves groups unread, which fill any limit at last; 1: this call gives the limit
--       | {'excluded', name, value}: with groups_per_version the task cannot have this setting
--@include task settings producers misfits changing uncounted permissions

check_permissions(KEYS[1])
begin_writing()
refuse_lost_settings()
if ARGV[2] == '0' and not exists() then
  return {'unknown'}
end
check_puts()
local revision, who, generation = ARGV[1], ARGV[3], tonumber(ARGV[5])
local stored_incarnation = redis.call('HGET', task, 'incarnation')
if stored_incarnation and stored_incarnation == ARGV[4] then
  remove_records(server_ms())
  return all_settings()
end
local created, rebuilt = not exists(), redis.call('HEXISTS', task, 'rebuilt') == 1
local used = number(puts, 'put') > 0 and not rebuilt
local differing, values, defaults, implied = {'differs'}, {}, {}, noted_settings('implied')
local configured, held = noted_settings('configured'), {}
local parted = false
local known = tonumber(redis.call('HGET', task, 'generation') or '')

-- The value that the task has without being given one: false if it may be given any.
local function unwritten(name, value)
  if used and ((name == 'order' and value ~= 'fifo') or name == 'tags') then
    return name == 'order' and 'fifo' or '' -- groups were put without
  end
  return name == 'partitions' and not created and not rebuilt and '1' -- it was created without partitions
end

local function ask(name, value)
  parted = parted or name == 'partitions'
  if value == '' then -- it was removed
    if (generation or 0) > (known or math.huge) then
      values[name] = false
    end
    return
  end
  local stored = redis.call('HGET', task, name) or unwritten(name, value)
  local newer = (generation or 0) > (known or math.huge) and (name ~= 'order' or can_sort_by(value))
  if configured[name] and stored ~= value and not newer then
    held[#held + 1] = name
  elseif not stored or stored == value or implied[name] or newer then
    values[name], implied[name] = value, nil
  elseif (generation or math.huge) >= (known or 0) then
    differing[#differing + 1], differing[#differing + 2] = name, stored
  end
end

for i = 6, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  local learned = string.match(name, '^configured:(.*)$')
  if string.sub(name, 1, 8) == 'default_' then
    defaults[name] = value
  elseif learned then
    ask(learned, value)
    if (generation or 0) >= (known or 0) then
      configured[learned] = true
    end
  elseif string.sub(name, 1, 8) ~= 'implied:' then
    ask(name, value)
  end
end
for i = 6, #ARGV, 2 do
  local name, value = string.match(ARGV[i], '^implied:(.*)$'), ARGV[i + 1]
  local free = implied[name] or name and not configured[name] and redis.call('HEXISTS', task, name) == 0
  if name and free and not values[name] then
    values[name], implied[name] = value ~= '' and value, value ~= '' or nil
    if name == 'order' and value ~= '' and not can_sort_by(value) then
      differing[#differing + 1], differing[#differing + 2] = name, redis.call('HGET', task, name) or 'fifo'
    end
  end
end
if not parted and redis.call('HEXISTS', task, 'partitions') == 1 then
  differing[#differing + 1] = 'partitions'
  differing[#differing + 1] = redis.call('HGET', task, 'partitions')
end
if #differing > 1 then
  return differing
end
local refused = misfit(values)
if refused then
  return refused
end
if values.order then
  redis.call('HDEL', task, 'rebuilt')
end
if created then
  -- an entry that was deleted leaves its id behind: ids count up from there
  redis.call('DEL', stream)
  redis.call('XADD', stream, BASE .. '0', 'g', '')
  redis.call('XDEL', stream, BASE .. '0')
  redis.call('HSET', puts, 'last', '0')
end
redis.call('HSETNX', task, 'incarnation', revision)
local added = created
for name, value in pairs(defaults) do
  added = redis.call('HSETNX', task, name, value) == 1 or added
end
if generation and (created or known) then
  redis.call('HSET', task, 'generation', math.max(generation, known or 0))
end
note_settings('implied', implied)
note_settings('configured', configured)
if not change(values, revision, who) and added then
  redis.call('HSET', task, 'revision', revision)
  pack_rules()
end
remove_records(server_ms())
return all_settings(held)
