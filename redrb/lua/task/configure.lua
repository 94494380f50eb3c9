-- Change settings of a task.
-- KEYS[1] stream
-- ARGV    the call `Configure` of redrb/stream/task/calls.py
-- Returns its reply; repeated, it changes nothing
--@include task settings misfits changing unrecorded permissions

check_permissions(KEYS[1])
begin_writing()
local ask, stored = cmsgpack.unpack(ARGV[1]), redis.call('HGET', task, 'revision')
if stored == ask.revision then
  return all_settings()
elseif stored ~= ask.expected then
  return cmsgpack.pack({outcome = 'changed'})
end
check_puts()
local values, implied, configured = {}, noted_settings('implied'), noted_settings('configured')
for name, value in pairs(ask.changes) do
  values[name], implied[name] = value ~= '' and value, nil
  configured[name] = name ~= 'order' and name ~= 'sampled' and name ~= 'tags' or nil
end
local refused = misfit(values)
if refused then
  return cmsgpack.pack(refused)
end
for name, value in pairs(values) do
  if needs_empty(name, value) then
    return cmsgpack.pack({outcome = 'holds', groups = redis.call('XLEN', stream)})
  end
end
note_settings('implied', implied)
note_settings('configured', configured)
if change(values, ask.revision, ask.who) then
  redis.call('HINCRBY', task, 'generation', 1)
end
return all_settings()
