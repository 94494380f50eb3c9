-- Replace tasks by their complete restore areas: all or none. The cost does not grow with the groups.
-- KEYS    stream of each task; on a cluster they share one slot
-- ARGV    the call `EndRestore` of redrb/stream/saving/calls.py
-- Returns its reply
--@include task settings membership removal elsewhere restore_area permissions

-- Return the settings of a task that its restore area lacks.
local function differing(settings)
  local found = {}
  for _, name in ipairs(SETTINGS) do
    local here_only = name == 'revision' or name == 'incarnation'
    if not here_only and settings[name] and settings[name] ~= redis.call('HGET', task, name) then
      found[#found + 1] = name
    end
  end
  return found
end

-- Check that a task may be replaced. Returns what replace() needs, or nil and the reply.
local function check(name, asked)
  work_on(name)
  if stored_now() > 0 or ever_put() ~= asked.put then
    return nil, {outcome = 'used', stream = name}
  end
  local settings, here = {}, redis.call('HGETALL', task) -- bound: settings and counters of the task
  for i = 1, #here, 2 do
    settings[here[i]] = here[i + 1]
  end
  local joined = groups()
  work_at(area_of(asked.token))
  if not exists() or not is_whole(asked.whole) then
    return nil, {outcome = 'gone', stream = name}
  end
  local others = differing(settings)
  if #others > 0 then
    return nil, {outcome = 'differs', stream = name, settings = others}
  end
  return {name = name, token = asked.token, put = asked.put, settings = settings, joined = joined}
end

local function replace(checked)
  local token, settings = checked.token, checked.settings
  work_on(checked.name)
  work_at(area_of(token))
  local version = tonumber(settings.version or '')
  if version and version > number(task, 'version') then
    redis.call('HSET', task, 'version', settings.version)
  end
  redis.call('HDEL', task, 'part')
  -- an incarnation into which nothing was put has no ids yet, so the restored task may go on with it
  redis.call('HSET', task, 'restored', token, 'revision', token,
    'incarnation', checked.put == 0 and settings.incarnation or string.match(token, '%x+$'))
  pack_rules()
  local names = names_of_keys()

  work_on(checked.name)
  delete_task(checked.joined)
  redis.call('DEL', key('restoring'))
  for _, name in ipairs(names) do
    local restored = area_of(token) .. name
    if redis.call('PERSIST', restored) == 1 or redis.call('EXISTS', restored) == 1 then
      redis.call('RENAME', restored, prefix .. name)
    end
  end
  work_on(checked.name) -- the rules are those of the restored task now
  for _, group in ipairs(checked.joined) do
    join(group) -- consumer groups that joined meanwhile; their next calls add the other pages
  end
end

check_permissions(KEYS[1])
begin_writing()
local ask, all = cmsgpack.unpack(ARGV[1]), {}
for i, name in ipairs(KEYS) do
  work_on(name)
  if redis.call('HGET', task, 'restored') == ask.tasks[i].token then -- all of them are
    return cmsgpack.pack({outcome = 'ok'})
  end
end
for i, name in ipairs(KEYS) do
  local checked, refusal = check(name, ask.tasks[i])
  if refusal then
    return cmsgpack.pack(refusal)
  end
  all[i] = checked
end
for _, checked in ipairs(all) do
  replace(checked)
end
return cmsgpack.pack({outcome = 'ok'})
