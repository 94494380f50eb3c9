-- Says which settings do not fit together: the rules of `TaskSettings.as_stored`, where several processes
-- have given some each.
--@include task

-- Why the settings of the task, with the changes to `values` (name -> value, false for none), do not fit
-- together: a reply, or nil.
local function misfit(values)
  local function setting(name)
    if values[name] ~= nil then
      return values[name]
    end
    return redis.call('HGET', task, name)
  end
  local reads = setting('groups_per_version') and setting('max_reads')
  if reads and reads ~= '1' then
    return {outcome = 'excluded', value = reads}
  end
end
