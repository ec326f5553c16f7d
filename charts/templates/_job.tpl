{{- /*
The Job template of one role: (dict "role" NAME "root" $). The operator fills in names, labels, counts,
arguments and ownership; see operators/manifests.py.
*/ -}}
{{- define "dflash.job" -}}
{{- $root := .root -}}
{{- $v := mustMergeOverwrite (deepCopy $root.Values.jobs) (deepCopy (index $root.Values.roles .role)) -}}
metadata:
  labels:
    {{- include "dflash.labels" $root | nindent 4 }}
spec:
  podReplacementPolicy: Failed
  {{- if eq .role "drafter" }}
  # A group lives and dies together: the operator starts the next attempt.
  backoffLimit: 0
  {{- else }}
  # Each index is replaced on its own. The operator keeps the budgets, and ends the Job when they are spent.
  backoffLimit: 2147483647
  podFailurePolicy:
    rules:
      - action: FailJob
        onExitCodes: {containerName: main, operator: In, values: [78]}
      - action: Ignore
        onPodConditions: [{type: DisruptionTarget, status: "True"}]
  {{- end }}
  template:
    {{- include "dflash.podTemplate" (dict "role" .role "root" $root "v" $v) | nindent 4 }}
{{- with $v.podTemplate }}
# Laid over the template by the operator, lists of named things by name.
podTemplatePatch:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "dflash.podTemplate" -}}
{{- $root := .root -}}
{{- $v := .v -}}
metadata:
  labels:
    {{- include "dflash.labels" $root | nindent 4 }}
    app.kubernetes.io/component: job
    {{- with $v.podLabels }}{{ toYaml . | nindent 4 }}{{- end }}
  annotations:
    cluster-autoscaler.kubernetes.io/safe-to-evict: "false"
    {{- with $v.podAnnotations }}{{ toYaml . | nindent 4 }}{{- end }}
spec:
  serviceAccountName: {{ include "dflash.name" $root }}-jobs
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ $v.terminationGracePeriodSeconds }}
  securityContext: {{ toYaml $v.podSecurityContext | nindent 4 }}
  {{- with $root.Values.images.pullSecrets }}
  imagePullSecrets: {{- range . }}
    - name: {{ . }}
  {{- end }}
  {{- end }}
  {{- with $v.nodeSelector }}
  nodeSelector: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.tolerations }}
  tolerations: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.affinity }}
  affinity: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.topologySpreadConstraints }}
  topologySpreadConstraints: {{ toYaml . | nindent 4 }}
  {{- end }}
  {{- with $v.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- with $v.runtimeClassName }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- with $v.schedulerName }}
  schedulerName: {{ . }}
  {{- end }}
  {{- with $v.resourceClaims }}
  resourceClaims: {{ toYaml . | nindent 4 }}
  {{- end }}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $v.shmSize }}}
    - name: scratch
      emptyDir: {{ if $v.scratchSize }}{sizeLimit: {{ $v.scratchSize }}}{{ else }}{}{{ end }}
    {{- with $v.volumes }}{{ toYaml . | nindent 4 }}{{- end }}
  containers:
    - name: main
      image: {{ index $root.Values.images $v.image | quote }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      command: {{ toYaml $v.command | nindent 8 }}
      # What it said last is its failure's message.
      terminationMessagePolicy: FallbackToLogsOnError
      {{- $security := deepCopy $v.securityContext }}
      {{- if $v.rdma.enabled }}
      {{- $_ := set $security "capabilities" (dict "drop" (list "ALL") "add" (list "IPC_LOCK")) }}
      {{- end }}
      securityContext: {{ toYaml $security | nindent 8 }}
      {{- $resources := deepCopy $v.resources }}
      {{- $devices := dict }}
      {{- if gt (int $v.gpus) 0 }}
      {{- $_ := set $devices $v.gpuResource (int $v.gpus) }}
      {{- end }}
      {{- if $v.rdma.enabled }}
      {{- $devices = mustMergeOverwrite $devices (deepCopy $v.rdma.resources) }}
      {{- end }}
      {{- if $devices }}
      {{- $_ := set $resources "limits" (mustMergeOverwrite (dict) (deepCopy ($resources.limits | default dict)) $devices) }}
      {{- end }}
      {{- with $resources }}
      resources: {{ toYaml . | nindent 8 }}
      {{- end }}
      env:
        - {name: PYTHONUNBUFFERED, value: "1"}
        - {name: HOME, value: /tmp}
        - {name: TOKENIZERS_PARALLELISM, value: "false"}
        {{- include "dflash.storageEnv" $root | nindent 8 }}
        {{- with $v.env }}{{ toYaml . | nindent 8 }}{{- end }}
      envFrom:
        {{- include "dflash.storageEnvFrom" $root | nindent 8 }}
        {{- with $v.wandbSecret }}
        - secretRef: {name: {{ . | quote }}}
        {{- end }}
        {{- with $v.envFrom }}{{ toYaml . | nindent 8 }}{{- end }}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        - {name: scratch, mountPath: /tmp}
        {{- with $v.volumeMounts }}{{ toYaml . | nindent 8 }}{{- end }}
{{- end -}}
