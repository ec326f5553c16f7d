{{- define "dflash.name" -}}
{{- /* 40 characters leave room for the longest suffix within 63. */ -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "dflash.labels" -}}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version | replace "+" "_" }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "dflash.selector" . }}
{{- end -}}

{{- define "dflash.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "dflash.credentials" -}}
{{- if .Values.storage.existingSecret -}}
{{ .Values.storage.existingSecret }}
{{- else if .Values.embeddedS3.enabled -}}
{{ include "dflash.name" . }}-s3
{{- end -}}
{{- end -}}

{{- define "dflash.endpoint" -}}
{{- if .Values.storage.endpoint -}}
{{ .Values.storage.endpoint }}
{{- else if .Values.embeddedS3.enabled -}}
http://{{ include "dflash.name" . }}-s3.{{ .Release.Namespace }}.svc:8333
{{- end -}}
{{- end -}}

{{- define "dflash.probeUri" -}}
{{- if .Values.storage.probeUri -}}
{{ .Values.storage.probeUri }}
{{- else if .Values.embeddedS3.enabled -}}
s3://{{ .Values.embeddedS3.bucket }}/helm-test
{{- end -}}
{{- end -}}

{{- define "dflash.storageEnv" -}}
{{- with include "dflash.endpoint" . }}
- {name: AWS_ENDPOINT_URL_S3, value: {{ . | quote }}}
{{- end }}
{{- if or .Values.storage.region .Values.embeddedS3.enabled }}
- {name: AWS_REGION, value: {{ .Values.storage.region | default "us-east-1" | quote }}}
{{- end }}
{{- end -}}

{{- define "dflash.storageEnvFrom" -}}
{{- with include "dflash.credentials" . }}
- secretRef: {name: {{ . | quote }}}
{{- end }}
{{- end -}}

{{- define "dflash.operatorSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "dflash.operatorPodSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- /* The pod of a hook, with the operator's image: (dict "root" $ "account" NAME "arguments" LIST). */ -}}
{{- define "dflash.hookPod" -}}
{{- $root := .root -}}
serviceAccountName: {{ .account }}
restartPolicy: Never
enableServiceLinks: false
securityContext: {{ include "dflash.operatorPodSecurity" $root | nindent 2 }}
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets: {{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
volumes:
  - name: scratch
    emptyDir: {}
  {{- with $root.Values.operator.volumes }}{{ toYaml . | nindent 2 }}{{- end }}
containers:
  - name: hook
    image: {{ $root.Values.images.operator | quote }}
    imagePullPolicy: {{ $root.Values.images.pullPolicy }}
    command:
      {{- toYaml $root.Values.operator.command | nindent 6 }}
      - -m
      - operators
      {{- range .arguments }}
      - {{ . }}
      {{- end }}
    securityContext: {{ include "dflash.operatorSecurity" $root | nindent 6 }}
    env:
      - {name: DFLASH_OPERATOR_NAMESPACE, value: {{ $root.Release.Namespace | quote }}}
      {{- with $root.Values.operator.env }}{{ toYaml . | nindent 6 }}{{- end }}
    volumeMounts:
      - {name: scratch, mountPath: /tmp}
      {{- with $root.Values.operator.volumeMounts }}{{ toYaml . | nindent 6 }}{{- end }}
{{- end -}}
